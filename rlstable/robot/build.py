"""Loads a model file and adds what a task needs and the model lacks: a floor, sensors, other kinds of actuators."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.robot import ActionConfig, TaskConfig
from rlstable.config.schema import first_line
from rlstable.robot import geometry

# Names of what is added. The velocities are of the root body, in its own frame.
FLOOR, ROOT_SITE = "rlstable_floor", "rlstable_root"
LINEAR_VELOCITY, ANGULAR_VELOCITY, ACCELERATION = "rlstable_velocimeter", "rlstable_gyro", "rlstable_accelerometer"
CONTACT = "rlstable_contact_"  # and the name of the geom
_ROOT_SENSORS = {
    LINEAR_VELOCITY: mujoco.mjtSensor.mjSENS_VELOCIMETER,
    ANGULAR_VELOCITY: mujoco.mjtSensor.mjSENS_GYRO,
    ACCELERATION: mujoco.mjtSensor.mjSENS_ACCELEROMETER,
}
_FOOT_HEIGHT = 0.1  # a foot is at most this share of the robot's height above the lowest point of all
_FOUND, _NEAREST = 1, 1  # data and reduction of MuJoCo's contact sensor


def read(path: str) -> mujoco.MjSpec:
    """The editable model of an MJCF or URDF file; a ConfigError if it cannot be read."""
    if not Path(path).is_file():
        raise ConfigError(f"env.xml: there is no file {path}; give the path of an MJCF file")
    try:
        return mujoco.MjSpec.from_file(path)
    except ValueError as error:
        raise ConfigError(f"env.xml: {path} cannot be read: {first_line(error)}") from None


def compiled(spec: mujoco.MjSpec, path: str) -> mujoco.MjModel:
    """The compiled model; a ConfigError that names the file and the first mistake in it."""
    try:
        model = spec.compile()
    except ValueError as error:
        raise ConfigError(f"env.xml: {path} cannot be compiled: {' '.join(str(error).split())}") from None
    if model.nu == 0:
        raise ConfigError(f"env.xml: {path} has no actuator; add <actuator> with a motor or a position servo per joint")
    if not any(not geometry.is_static(model, body) for body in range(model.nbody)):
        raise ConfigError(f"env.xml: {path} has no joint; nothing in it can move")
    return model


def keyframe(model: mujoco.MjModel, name: str | None) -> int | None:
    """Index of the keyframe that is home: the named one, else `home`; None for the model's `qpos0`."""
    names = [model.key(i).name for i in range(model.nkey)]
    if name is not None and name not in names:
        found = f"it has {', '.join(filter(None, names))}" if names else "it has none"
        raise ConfigError(f"env.task.keyframe: the model has no keyframe {name!r}; {found}, and null takes qpos0")
    name = "home" if name is None else name
    return names.index(name) if name in names else None


def home_position(model: mujoco.MjModel, key: int | None) -> np.ndarray:
    return np.array(model.qpos0 if key is None else model.key_qpos[key])


def root_body(model: mujoco.MjModel, name: str | None) -> int:
    """The named body; else the first one with a free joint, else the first one with a joint."""
    names = [model.body(i).name for i in range(model.nbody)]
    if name is not None:
        if name not in names:
            raise ConfigError(f"env.task.root: the model has no body {name!r}; it has {', '.join(names[1:])}")
        return names.index(name)
    free = [j for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    return int(model.jnt_bodyid[(free or [0])[0]])


def feet(model: mujoco.MjModel, qpos: np.ndarray) -> list[int]:
    """Geoms that touch the floor at home: the lowest one of each limb's last body, if no other is much lower."""
    data, geoms = geometry.in_pose(model, qpos), geometry.colliding(model)
    heights = {geom: geometry.lowest(model, data, geom) for geom in geoms}
    if not heights:
        return []
    bottom = min(heights.values())
    reach = _FOOT_HEIGHT * (max(float(data.geom_xpos[geom, 2]) for geom in geoms) - bottom)
    bodies = {int(model.geom_bodyid[geom]) for geom in geoms}
    last = bodies - {int(model.body_parentid[body]) for body in bodies}
    lowest = [min((g for g in geoms if model.geom_bodyid[g] == body), key=heights.__getitem__) for body in last]
    return sorted(geom for geom in lowest if heights[geom] - bottom <= reach)


def load(path: str, task: TaskConfig, touching: Collection[str], needs: Collection[str]) -> mujoco.MjModel:
    """The model of a task. `touching` are names of geoms or bodies whose contacts its terms read."""
    spec = read(path)
    model = compiled(spec, path)
    qpos, root = home_position(model, keyframe(model, task.keyframe)), root_body(model, task.root)
    bodies, geoms = ({x.id: x for x in elements} for elements in (spec.bodies, spec.geoms))  # before anything is added
    floating = bool((model.jnt_type == mujoco.mjtJoint.mjJNT_FREE).any())
    if task.floor == "always" or (task.floor == "auto" and floating and not geometry.floors(model)):
        _add_floor(spec, model, qpos)
    _convert(spec, model, task.actions)
    site = bodies[root].add_site(name=ROOT_SITE)
    for name, kind in _ROOT_SENSORS.items():
        if name != ACCELERATION or ("accelerometer" in needs and not (model.sensor_type == kind).any()):
            spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname=site.name)
    touched = {g for name in touching for g in geoms_of(model, name)}
    for geom in sorted(touched | {*(feet(model, qpos) if "feet" in needs else ())}):
        _add_contact_sensor(spec, geoms[geom], geom_name(model, geom))
    return compiled(spec, path)


def geoms_of(model: mujoco.MjModel, name: str) -> list[int]:
    """The colliding geoms of a geom's or a body's name; a ConfigError without one."""
    geoms = geometry.colliding(model)
    found = [g for g in geoms if name in (geom_name(model, g), model.body(model.geom_bodyid[g]).name)]
    if not found:
        known = sorted({model.body(model.geom_bodyid[g]).name for g in geoms} | {geom_name(model, g) for g in geoms})
        raise ConfigError(f"geoms: no geom or body {name!r} of the model can collide; choose of {', '.join(known)}")
    return found


def geom_name(model: mujoco.MjModel, geom: int) -> str:
    return str(model.geom(geom).name) or f"geom{geom}"


def _add_floor(spec: mujoco.MjSpec, model: mujoco.MjModel, qpos: np.ndarray) -> None:
    """A plane under the lowest point of the robot at home."""
    data = geometry.in_pose(model, qpos)
    height = min((geometry.lowest(model, data, geom) for geom in geometry.colliding(model)), default=0.0)
    every = 2**31 - 1  # collides with every geom that collides with anything
    spec.worldbody.add_geom(
        name=FLOOR, type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05], pos=[0, 0, height], contype=every,
        conaffinity=every, rgba=[0.6, 0.65, 0.7, 1],
    )  # fmt: skip


def _add_contact_sensor(spec: mujoco.MjSpec, geom: mujoco.MjsGeom, name: str) -> None:
    geom.name = name
    sensor = spec.add_sensor(name=CONTACT + name, type=mujoco.mjtSensor.mjSENS_CONTACT)
    sensor.objtype, sensor.objname = mujoco.mjtObj.mjOBJ_GEOM, name
    sensor.intprm[:3] = [_FOUND, _NEAREST, 1]


def kind_of(model: mujoco.MjModel, actuator: int) -> str:
    """Meaning of an actuator's control: a target `position` or `velocity`, or else a `torque`."""
    gain, bias = model.actuator_gainprm[actuator, 0], model.actuator_biasprm[actuator]
    if model.actuator_biastype[actuator] != mujoco.mjtBias.mjBIAS_AFFINE:
        return "torque"
    if gain and np.isclose(bias[1], -gain):
        return "position"
    return "velocity" if gain and np.isclose(bias[2], -gain) else "torque"


def _convert(spec: mujoco.MjSpec, model: mujoco.MjModel, actions: ActionConfig) -> None:
    """Changes the kind of all actuators to the task's, with limits of joints and forces as before."""
    if actions.control == "auto":
        return
    for i, actuator in enumerate(spec.actuators):
        same = kind_of(model, i) == actions.control and actions.stiffness is None and actions.damping is None
        if same:
            continue
        if model.actuator_trntype[i] != mujoco.mjtTrn.mjTRN_JOINT:
            raise ConfigError(
                f"env.task.actions.control: {actions.control} needs actuators of joints, and {actuator.name or i} has "
                "another transmission; set auto"
            )
        _set_kind(actuator, model, i, actions)


def _set_kind(actuator: mujoco.MjsActuator, model: mujoco.MjModel, i: int, actions: ActionConfig) -> None:
    joint, limit, gear = int(model.actuator_trnid[i, 0]), force_limit(model, i), float(model.actuator_gear[i, 0])
    actuator.gear[:] = [1.0, 0, 0, 0, 0, 0]
    torque = limit * abs(gear)
    if actions.control == "torque":
        actuator.set_to_motor()
        actuator.ctrlrange[:] = [-torque, torque]
        actuator.ctrllimited = 1
        return
    needed = "stiffness" if actions.control == "position" else "damping"
    gain = getattr(actions, needed)
    if gain is None:
        raise ConfigError(
            f"env.task.actions.{needed}: is null; control={actions.control} turns actuators into servos, which need "
            "this gain"
        )
    if actions.control == "position":
        actuator.set_to_position(kp=gain, kv=actions.damping or 0.0)
        actuator.ctrlrange[:] = model.jnt_range[joint]
        actuator.ctrllimited = int(model.jnt_limited[joint])
    else:
        actuator.set_to_velocity(kv=gain)
        actuator.ctrllimited = 0
    actuator.forcerange[:] = [-torque, torque]
    actuator.forcelimited = 1


def force_limit(model: mujoco.MjModel, actuator: int) -> float:
    """Largest force of an actuator: its own limit, else that of its control range, else that of a control of 1."""
    if model.actuator_forcelimited[actuator]:
        return float(np.abs(model.actuator_forcerange[actuator]).max())
    gain = abs(float(model.actuator_gainprm[actuator, 0])) or 1.0
    limited = model.actuator_ctrllimited[actuator]
    return gain * (float(np.abs(model.actuator_ctrlrange[actuator]).max()) if limited else 1.0)
