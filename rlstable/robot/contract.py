"""The contract of a robot's policy, as JSON data: all that a program needs to run the policy without rlstable.

Keys that the exporter of mjlab has, such as `joint_names` and `action_scale`, have the names and the meaning of mjlab.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import mujoco
import numpy as np

from rlstable.config.curriculum import Curriculum
from rlstable.config.robot import TaskConfig
from rlstable.robot import actions, build, commands, observations, terms
from rlstable.robot.environment import RobotEnv
from rlstable.robot.model import Robot
from rlstable.robot.observing import Observer, Part

Entry = dict[str, Any]

# Fields of an actuator that `env.task.actions.control` changes; MuJoCo 4 has brought `ctrlspec`.
_CONVERTED = (
    "gaintype", "biastype", "dyntype", "ctrlspec", "ctrllimited", "forcelimited", "gainprm", "biasprm", "dynprm",
    "gear", "ctrlrange", "forcerange",
)  # fmt: skip


def contract(env: RobotEnv, key: str = "state") -> Entry:
    """The contract of the policies of an environment that read the observation with this key."""
    robot, task, observer = env.robot, env.task, env.observers[key]
    parts = observer.parts
    keyframe = build.keyframe(robot.model, task.keyframe)
    return {
        "joint_names": [joint.name for joint in robot.joints],
        "default_joint_pos": [joint.home for joint in robot.joints],
        "joint_stiffness": [_gain(robot, joint.name, "stiffness") for joint in robot.joints],
        "joint_damping": [_gain(robot, joint.name, "damping") for joint in robot.joints],
        "action_scale": _shortest(actions.scales(robot, task.actions)[1]),
        "action_scale_down": _shortest(actions.scales(robot, task.actions)[0]),
        "observation_names": [part.name for part in parts],
        "command_names": sorted(task.commands),
        "observations": [_observation(robot, observer, part) for part in parts],
        "commands": [_command(env, name) for name in sorted(task.commands)],
        "actuators": [_actuator(robot, i) for i in range(len(robot.actuators))],
        "action_clip": task.actions.clip,
        "action_delay": {"least": task.actions.delay[0], "most": task.actions.delay[1]},
        "action_filter": task.actions.filter,
        "control_dt": robot.control_dt,
        "decimation": robot.substeps,
        "keyframe": None if keyframe is None else robot.model.key(keyframe).name,
        "default_qpos": robot.home.tolist(),
        "root_body": build.name_of(robot.model, "body", robot.root),
        "default_height": robot.home_height,
        "floor_height": robot.floor,
        "down": _shortest(robot.down),
        "up_axis": _shortest(robot.up_axis),
        "foot_sensors": [_contacts(robot.model, foot) for foot in robot.feet],
        "endings": [
            {"name": name, "term": config.path(name), "parameters": _parameters(env.lists.endings[name])}
            for name, config in task.endings.items()
            if robot.moves or config.path(name) != "fallen"
        ],
        "model_hash": hashlib.sha256(binary(robot.model)).hexdigest(),
        "model_additions": _additions(robot, task),
    }


def _gain(robot: Robot, joint: str, kind: str) -> float:
    """A gain of a joint: the sum of its actuators' gains, in units of the joint."""
    squares = robot.model.actuator_gear[:, 0] ** 2
    own = [i for i, actuator in enumerate(robot.actuators) if actuator.joint == joint]
    return float(sum(squares[i] * getattr(robot.actuators[i], kind) for i in own))


def binary(model: mujoco.MjModel) -> bytes:
    """The compiled model as the content of an `.mjb` file."""
    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return buffer.tobytes()


def _observation(robot: Robot, observer: Observer, part: Part) -> Entry:
    config = part.config
    term = config.path(part.name)
    delay = {"least": config.delay[0], "most": config.delay[1]}
    shown = {"scale": config.scale, "clip": config.clip, "noise": _last(config.noise)}
    parameters = _parameters(observer.functions[part.name])
    return {
        "name": part.name, "term": term, "size": part.size, **shown, "history": config.history, "delay": delay,
        "parameters": parameters, **_sources(robot, term, parameters),
    }  # fmt: skip


def _sources(robot: Robot, term: str, parameters: Entry) -> Entry:
    """Names of the parts of the model that an observation term reads: `joints`, `site`, or groups of `sensors`."""
    model = robot.model
    if term in ("joint_positions", "joint_velocities"):
        return {"joints": [joint.name for joint in robot.joints if parameters.get("turning", True) or not joint.turns]}
    if term == "joint_directions":
        return {"joints": [joint.name for joint in robot.joints if joint.turns]}
    if term in ("site_position", "site_to_target"):
        return {"site": build.name_of(model, "site", robot.site(parameters["site"]))}
    if term in observations.INERTIAL:
        return {"sensors": [[build.name_of(model, "sensor", robot.root_sensor(observations.INERTIAL[term]))]]}
    if term == "linear_velocity":
        return {"sensors": [[build.LINEAR_VELOCITY]]}
    if term == "sensor":
        return {"sensors": [[parameters["name"]]]}
    if term == "contact":
        return {"sensors": [_contacts(model, build.geoms_of(model, name)) for name in parameters["geoms"]]}
    if term == "foot_contacts":
        return {"sensors": [_contacts(model, foot) for foot in robot.feet]}
    return {}


def _contacts(model: mujoco.MjModel, geoms: Iterable[int]) -> list[str]:
    return [build.CONTACT + build.name_of(model, "geom", geom) for geom in geoms]


def _command(env: RobotEnv, name: str) -> Entry:
    """A command; `low`, `high` and `default` are null for a command of the user's own."""
    robot, config, function = env.robot, env.task.commands[name], env.lists.commands[name]
    term, parameters = config.path(name), _parameters(function)
    last = terms.with_grown(function, np.inf)
    size = int(jax.eval_shape(lambda key: last(robot, key), jax.random.PRNGKey(0)).shape[0])
    low, high, default = None, None, None
    if term == "velocity":
        low, high = (_shortest(np.asarray(x)) for x in commands.velocity_ranges(robot, **parameters))
        default = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    elif term == "pose":
        reachable = robot.reachable(robot.site(parameters["site"]))
        low, high, default = (_shortest(x) for x in (reachable.min(axis=0), reachable.max(axis=0), reachable[0]))
    limits = {"low": low, "high": high, "default": default}
    return {"name": name, "term": term, "size": size, "resample": config.resample, **limits, "parameters": parameters}


def _actuator(robot: Robot, i: int) -> Entry:
    """An actuator; `low` and `high` are null without a limit, and `activation` for one without a state."""
    actuator, state = robot.actuators[i], int(robot.model.actuator_actadr[i])
    numbers = {key: getattr(actuator, key) for key in ("low", "high", "home", "stiffness", "damping", "force")}
    names = {key: getattr(actuator, key) for key in ("name", "joint", "kind")}
    activation = {"activation": float(robot.activation[state]) if state >= 0 else None}
    return names | {key: x if np.isfinite(x) else None for key, x in numbers.items()} | activation


def _additions(robot: Robot, task: TaskConfig) -> Entry:
    """Additions and changes that training has made to the model file, as arguments of `mujoco.MjSpec`."""
    model = robot.model
    sensors = (i for i in range(model.nsensor) if model.sensor(i).name.startswith("rlstable_"))
    sites = [str(model.site(i).name) for i in range(model.nsite)]
    floors = (i for i in range(model.ngeom) if model.geom(i).name == build.FLOOR)
    converted = task.actions.control != "auto"
    return {
        "floor": next(({"name": build.FLOOR, **_floor(model, i)} for i in floors), None),
        "root_site": build.ROOT_SITE,
        "link_sites": {
            name: {"body": name.removeprefix(build.LINK), "pos": model.site_pos[i].tolist()}
            for i, name in enumerate(sites)
            if name.startswith(build.LINK)
        },
        "sensors": [_sensor(model, i) for i in sensors],
        "actuators": [_converted(model, i) for i in range(model.nu)] if converted else None,
    }


def _floor(model: mujoco.MjModel, geom: int) -> Entry:
    fields = ("type", "size", "pos", "contype", "conaffinity", "rgba")
    return {field: getattr(model, f"geom_{field}")[geom].tolist() for field in fields}


def _sensor(model: mujoco.MjModel, sensor: int) -> Entry:
    kind, index = int(model.sensor_objtype[sensor]), int(model.sensor_objid[sensor])
    return {
        "name": model.sensor(sensor).name,
        "type": int(model.sensor_type[sensor]),
        "objtype": kind,
        "objname": mujoco.mj_id2name(model, kind, index),
        "intprm": model.sensor_intprm[sensor].tolist(),
    }


def _converted(model: mujoco.MjModel, actuator: int) -> Entry:
    arrays = {field: getattr(model, f"actuator_{field}", None) for field in _CONVERTED}
    return {field: array[actuator].tolist() for field, array in arrays.items() if array is not None}


def _parameters(function: Any) -> Entry:
    return {key: _last(value) for key, value in terms.arguments(function).items()}


def _last(value: Any) -> Any:
    """A value of the configuration; a curriculum's at its end."""
    return value.end if isinstance(value, Curriculum) else value


def _shortest(array: np.ndarray) -> list[float]:
    """Numbers of float32 with their own digits: 0.4, not 0.4000000059604645."""
    return [float(str(x)) for x in array]
