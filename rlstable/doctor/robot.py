"""The first look at a robot: its model as tables, what the task takes from it, and what is wrong with it at home."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.robot import TaskConfig
from rlstable.doctor import trial
from rlstable.doctor.lints import Finding, names
from rlstable.io.files import write_atomically
from rlstable.render.episode import RecordedEpisodes, Recording
from rlstable.render.page import page as page_of
from rlstable.robot import actions, actuators, build, commands, geometry
from rlstable.robot.model import Robot

Cell = str | float | None
_JOINTS = {int(kind): kind.name.removeprefix("mjJNT_").lower() for kind in mujoco.mjtJoint.__members__.values()}
_SENSOR, _FEW = "mjSENS_", 4  # more sensors of a kind are counted, not named
_FLOATS = 0.03  # metres between the feet and the floor at home from which the robot falls


@dataclasses.dataclass(frozen=True)
class RobotFacts:
    """The facts of a robot for a table and for JSON; None stands for a limit or a value that the model lacks."""

    model: dict[str, str]
    joints: list[dict[str, Cell]]
    actuators: list[dict[str, Cell]]
    task: dict[str, str]


def facts(robot: Robot, task: TaskConfig, file: str, page: Path) -> RobotFacts:
    scales = actions.scales(robot, task.actions)
    rows = [_actuator(robot, i, float(scale)) for i, scale in enumerate(scales.max(axis=0))]
    joints = [_joint(robot, j) for j in range(robot.model.njnt)]
    return RobotFacts(_model(robot, file, page), joints, rows, _task(robot, task))


def findings(robot: Robot, task: TaskConfig) -> list[Finding]:
    """Findings at home, in the actuators, and in a few simulated seconds."""
    static = (*_home(robot, task), *_floor(robot), *_control_ranges(robot), *_passive(robot), *_balls(robot))
    return [*static, *trial.findings(robot, task)]


def draw(robot: Robot, path: Path) -> None:
    """Writes a page with the robot at home, which a browser can turn."""
    home = Recording("home", robot.home[None], np.zeros(0), aborted=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page_of(RecordedEpisodes(path.parent.name, robot.model, robot.control_dt, (home,))))


# --- tables


def _model(robot: Robot, file: str, page: Path) -> dict[str, str]:
    model = robot.model
    moving = [body for body in range(model.nbody) if not geometry.is_static(model, body)]
    own = _own(model, "sensor")
    kinds = [mujoco.mjtSensor(model.sensor_type[i]).name.removeprefix(_SENSOR).lower() for i in own]
    many = {kind: f"{count} {kind}" for kind, count in Counter(kinds).items() if count > _FEW}
    named = zip(names(model, "sensor", own), kinds, strict=True)
    sensors = [*many.values(), *(f"{name} ({kind})" for name, kind in named if kind not in many)]
    return {
        "file": file,
        "mass": f"{model.body_mass[moving].sum():.4g} kg in {len(moving)} moving bodies",
        "time step": f"{model.opt.timestep:g} s, {mujoco.mjtIntegrator(model.opt.integrator).name[6:].lower()}",
        "sensors": ", ".join(sensors) or "none",
        "keyframes": ", ".join(names(model, "key", range(model.nkey))) or "none",
        "sites": ", ".join(names(model, "site", _own(model, "site"))) or "none",
        "page": str(page),
    }


def _joint(robot: Robot, j: int) -> dict[str, Cell]:
    model = robot.model
    dof, limited = model.jnt_dofadr[j], bool(model.jnt_limited[j])
    kind = _JOINTS[int(model.jnt_type[j])]
    return {
        "joint": names(model, "joint", [j])[0],
        "type": kind,
        "low": float(model.jnt_range[j, 0]) if limited else None,
        "high": float(model.jnt_range[j, 1]) if limited else None,
        "home": float(robot.home[model.jnt_qposadr[j]]) if kind in ("hinge", "slide") else None,
        "damping": float(model.dof_damping[dof]),
        "armature": float(model.dof_armature[dof]),
    }


def _actuator(robot: Robot, i: int, scale: float) -> dict[str, Cell]:
    actuator = robot.actuators[i]
    low, high = (x if np.isfinite(x) else None for x in (actuator.low, actuator.high))
    return {
        "actuator": actuator.name,
        "joint": actuator.joint,
        "kind": actuator.kind,
        "stiffness": actuator.stiffness,
        "damping": abs(actuator.damping),
        "low": low,
        "high": high,
        "home": actuator.home,
        "scale": scale,
        "force": _torque(robot, i),
    }


def _torque(robot: Robot, i: int) -> float:
    """Largest force of an actuator, in N m or N; at a site or body its force, or its torque without one."""
    gear = robot.model.actuator_gear[i]
    along = [np.linalg.norm(gear[:3]) or np.linalg.norm(gear[3:]), abs(gear[0])][actuators.has_length(robot.model, i)]
    return robot.actuators[i].force * float(along)


def _task(robot: Robot, task: TaskConfig) -> dict[str, str]:
    model = robot.model
    key = build.keyframe(model, task.keyframe)
    ground = geometry.ground(model, geometry.in_pose(model, robot.home), robot.root)
    added = any(model.geom(geom).name == build.FLOOR for geom in range(model.ngeom))
    home = f"keyframe {names(model, 'key', [key])[0]}" if key is not None else "the model's first position"
    feet = build.feet(model, robot.home, robot.root) if robot.moves else []
    moves = "a free joint" if robot.floating else "its joints" if robot.moves else "nothing: the base is fixed"
    return {
        "home": f"{home}, with env.task.home" if task.home else home,
        "root body": f"{model.body(robot.root).name}, {robot.home_height:.3g} m above the floor, moved by {moves}",
        "floor": "none" if ground is None else f"height {robot.floor:.3g} m{', added' if added else ''}",
        "feet": ", ".join(_foot(model, foot) for foot in feet) or "none",
        "reaching site": _reaching(robot),
        "velocities": commands.text(*commands.velocity_ranges(robot, None, None, None)) if robot.moves else "none",
        "actions": f"{len(robot.actuators)}, each for {robot.control_dt:g} s ({robot.substeps} time steps)",
    }


def _foot(model: mujoco.MjModel, geoms: list[int]) -> str:
    first = model.geom(geoms[0])
    one = first.name or model.body(int(first.bodyid[0])).name or build.name_of(model, "geom", geoms[0])
    return one if len(geoms) == 1 else f"{one} ({len(geoms)} geoms)"


def _reaching(robot: Robot) -> str:
    try:
        site = robot.site(None)
    except ConfigError:
        return "none"
    name = names(robot.model, "site", [site])[0].removeprefix(build.LINK)
    return name if robot.reaches(site) else "none that the joints move"


def _own(model: mujoco.MjModel, kind: str) -> list[int]:
    """Parts of the model that the task has not added."""
    parts = range(getattr(model, f"n{kind}"))
    return [i for i in parts if not getattr(model, kind)(i).name.startswith("rlstable_")]


# --- findings


def _home(robot: Robot, task: TaskConfig) -> Iterator[Finding]:
    keys = [robot.model.key(i).name for i in range(robot.model.nkey) if robot.model.key(i).name]
    if keys and not task.home and build.keyframe(robot.model, task.keyframe) is None:
        what = f"the model has no keyframe home, so that home is qpos0; it has {', '.join(keys)}"
        yield Finding("note", "home", (), what, f"env.task.keyframe={keys[0]}, if the robot starts there")
    outside = [joint for joint in robot.joints if not joint.low - 1e-6 <= joint.home <= joint.high + 1e-6]
    if outside:
        what = "home is outside of the joint's range, and the limit pushes it from the start"
        advice = "a keyframe home within the ranges, or env.task.home={joint: position}"
        yield Finding("warning", "home", tuple(joint.name for joint in outside), what, advice)


def _floor(robot: Robot) -> Iterator[Finding]:
    if not robot.floating or not robot.gravity:
        return
    data, geoms = geometry.in_pose(robot.model, robot.home), build.own_geoms(robot.model, robot.root)
    if geometry.ground(robot.model, data, robot.root) is None:
        advice = "env.task.floor=auto, or a plane in the model"
        yield Finding("warning", "floor", (), "there is no floor, and the robot falls for ever", advice)
        return
    if not geoms:
        advice = "contype and conaffinity, or contact pairs, which a scene of the robot may have: env.xml=scene.xml"
        yield Finding(
            "warning", "floor", (), "no geom of the robot can collide, and it falls through the floor", advice
        )
        return
    gap = min((geometry.lowest(robot.model, data, geom) for geom in geoms), default=robot.floor) - robot.floor
    if gap > _FLOATS:
        what = f"the robot is {gap:.3g} m above the floor at home, and falls"
        yield Finding("warning", "home", (), what, f"a keyframe home that is {gap:.3g} m lower")


def _control_ranges(robot: Robot) -> Iterator[Finding]:
    limited = {joint.name for joint in robot.joints if np.isfinite(joint.low)}
    free = [
        one
        for i, one in enumerate(robot.actuators)
        if not np.isfinite(one.high)
        and not (one.kind == "position" and one.joint in limited)
        and not (one.kind == "torque" and actuators.force_limits(robot.model, i))
    ]
    if free:
        what = "no control range, so that the task takes controls of -1 to 1 for half of it"
        advice = "ctrlrange of the actuator, as in the data sheet; or for wheels env.task.actions.scale.velocity"
        yield Finding("warning", "control range", tuple(one.name for one in free), what, advice)


def _passive(robot: Robot) -> Iterator[Finding]:
    _, unseen = build.passive(robot.model, robot.root)
    if unseen:
        what = "no actuator and no sensor: the policy does not observe this joint"
        advice = "a jointpos sensor in the model, if the robot can measure it"
        yield Finding("note", "passive joint", tuple(names(robot.model, "joint", unseen)), what, advice)


def _balls(robot: Robot) -> Iterator[Finding]:
    balls = np.flatnonzero(robot.model.jnt_type == mujoco.mjtJoint.mjJNT_BALL)
    if balls.size:
        found = tuple(robot.model.joint(j).name or f"joint{j}" for j in balls.tolist())
        what = "ball joints are in no joint term, so that the policy does not see them"
        advice = "three hinges in their place, or a framequat sensor of the body and the observation term sensor"
        yield Finding("warning", "ball joint", found, what, advice)
