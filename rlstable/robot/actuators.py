"""Actuators of a robot: their kind, their limits, and servos or motors that a task asks for."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

import mujoco
import numpy as np

from rlstable.config import ConfigError
from rlstable.config.robot import ActionConfig

_MOVABLE = (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE)
_SINGLE = [int(kind) for kind in _MOVABLE]  # NumPy does not find the enums
_OF_JOINTS = (int(mujoco.mjtTrn.mjTRN_JOINT), int(mujoco.mjtTrn.mjTRN_JOINTINPARENT))
_KEY = "env.task.actions"
_INTEGRATES = int(mujoco.mjtDyn.mjDYN_INTEGRATOR)
# Actuators with one number of state, which ends at the control, or at its integral.
_WITH_STATE = (
    _INTEGRATES,
    *(int(getattr(mujoco.mjtDyn, f"mjDYN_{kind}")) for kind in ("FILTER", "FILTEREXACT", "MUSCLE")),
)


def kind_of(model: mujoco.MjModel, actuator: int) -> str:
    """Meaning of an actuator's control: a target `position` or `velocity`, or else a `torque`."""
    gain, bias = model.actuator_gainprm[actuator, 0], model.actuator_biasprm[actuator]
    if model.actuator_dyntype[actuator] == _INTEGRATES:
        return "velocity"  # of the target
    if model.actuator_biastype[actuator] != mujoco.mjtBias.mjBIAS_AFFINE:
        return "torque"
    if gain and np.isclose(bias[1], -gain):
        return "position"
    return "velocity" if gain and np.isclose(bias[2], -gain) else "torque"


def force_limits(model: mujoco.MjModel, actuator: int) -> list[float]:
    """Limits of an actuator's force: its own and that of its joint, if they exist."""
    joint, gear = int(model.actuator_trnid[actuator, 0]), abs(float(model.actuator_gear[actuator, 0]))
    limits = [model.actuator_forcerange[actuator]] if model.actuator_forcelimited[actuator] else []
    if _moves_one_joint(model, actuator) and model.jnt_actfrclimited[joint] and gear:
        limits.append(model.jnt_actfrcrange[joint] / gear)
    return [float(np.abs(limit).max()) for limit in limits]


def force_limit(model: mujoco.MjModel, actuator: int) -> float:
    """Largest force of an actuator: its least limit, else that of its control range, else that of a control of 1."""
    gain = abs(float(model.actuator_gainprm[actuator, 0])) or 1.0
    limited = model.actuator_ctrllimited[actuator]
    control = float(np.abs(model.actuator_ctrlrange[actuator]).max()) if limited else 1.0
    return min(force_limits(model, actuator), default=gain * control)


def activation(model: mujoco.MjModel, controls: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """States of actuators that have had these controls for long, and whose targets are these lengths, `[na]`."""
    states = np.zeros(model.na)
    for i in np.flatnonzero(model.actuator_actnum):
        kind = int(model.actuator_dyntype[i])
        if model.actuator_actnum[i] != 1 or kind not in _WITH_STATE:
            raise ConfigError(
                f"env.xml: actuator {model.actuator(i).name or i} has a state that tasks do not know "
                f"({mujoco.mjtDyn(kind).name}); known are integrators, filters (timeconst) and muscles"
            )
        states[model.actuator_actadr[i]] = lengths[i] if kind == _INTEGRATES else controls[i]
    return states


def drives_joint(model: mujoco.MjModel, actuator: int) -> bool:
    """Whether a joint is the transmission."""
    return int(model.actuator_trntype[actuator]) in _OF_JOINTS


def has_length(model: mujoco.MjModel, actuator: int) -> bool:
    """Whether the transmission is a length or an angle, and not a force at a site or body."""
    return int(model.actuator_trntype[actuator]) not in (mujoco.mjtTrn.mjTRN_SITE, mujoco.mjtTrn.mjTRN_BODY)


def driven(model: mujoco.MjModel) -> list[int]:
    """Joints that are the transmission of an actuator."""
    return [int(model.actuator_trnid[i, 0]) for i in range(model.nu) if drives_joint(model, i)]


def _moves_one_joint(model: mujoco.MjModel, actuator: int) -> bool:
    """Whether a hinge or a slide is the transmission."""
    return drives_joint(model, actuator) and model.jnt_type[model.actuator_trnid[actuator, 0]] in _SINGLE


def by_joint(key: str, numbers: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """The number of each joint that a pattern matches, by name; of several patterns the first one counts.

    Raises `ConfigError` if a pattern matches no joint.
    """
    names = [*names]
    found: dict[str, float] = {}
    for pattern, number in numbers.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"{key}: the model has no joint {pattern!r}; it has {', '.join(names)}")
        found = dict.fromkeys(matched, number) | found
    return found


def add_motors(spec: mujoco.MjSpec, actions: ActionConfig) -> None:
    """A motor for every hinge and slide of a model without actuators, with the joint's force limit, as in a URDF.

    A joint that an equality couples to another one, as a URDF's `mimic`, gets none.
    """
    coupled = {x.name1 for x in spec.equalities if x.type == mujoco.mjtEq.mjEQ_JOINT and x.name2 and x.active}
    free = [joint for joint in spec.joints if joint.type in _MOVABLE and joint.name not in coupled]
    for i, joint in enumerate(free):
        joint.name = joint.name or f"joint{i}"
    forces = by_joint(f"{_KEY}.force", actions.force or {}, [joint.name for joint in free])
    for joint in free:
        limit = forces.get(joint.name, float(np.abs(joint.actfrcrange).max()))
        if limit == 0.0:
            raise ConfigError(
                f"{_KEY}.force: joint {joint.name} has no largest force; set this key, <limit effort> in a URDF or "
                "actuatorfrcrange in MJCF, or add actuators to the model"
            )
        motor = spec.add_actuator(name=joint.name, target=joint.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        motor.set_to_motor()
        motor.ctrlrange[:] = [-limit, limit]
        motor.ctrllimited = 1


def convert(spec: mujoco.MjSpec, model: mujoco.MjModel, actions: ActionConfig) -> None:
    """Changes the kind of all actuators to the task's, with limits of joints and forces as before."""
    if actions.control == "auto":
        return
    joints = [str(model.joint(j).name) for j in range(model.njnt) if model.jnt_type[j] in _SINGLE]
    given = {key: getattr(actions, key) for key in ("stiffness", "damping", "force")}
    numbers = {key: by_joint(f"{_KEY}.{key}", own or {}, joints) for key, own in given.items()}
    for i, actuator in enumerate(spec.actuators):
        if kind_of(model, i) == actions.control and not any(given.values()):
            continue
        if not _moves_one_joint(model, i):
            raise ConfigError(
                f"env.task.actions.control: {actions.control} needs actuators of hinges and slides, and "
                f"{actuator.name or i} has another transmission; set auto"
            )
        own = {key: found.get(str(model.joint(model.actuator_trnid[i, 0]).name)) for key, found in numbers.items()}
        _set_kind(actuator, model, i, actions.control, **own)


def _set_kind(
    actuator: mujoco.MjsActuator,
    model: mujoco.MjModel,
    i: int,
    kind: str,
    stiffness: float | None,
    damping: float | None,
    force: float | None,
) -> None:
    joint, gear = int(model.actuator_trnid[i, 0]), float(model.actuator_gear[i, 0])
    actuator.gear[:] = [1.0, 0, 0, 0, 0, 0]
    torque = force_limit(model, i) * abs(gear) if force is None else force
    if kind == "torque":
        actuator.set_to_motor()
        actuator.ctrlrange[:] = [-torque, torque]
        actuator.ctrllimited = 1
        return
    needed, gain = ("stiffness", stiffness) if kind == "position" else ("damping", damping)
    if gain is None:
        raise ConfigError(
            f"{_KEY}.{needed}: joint {model.joint(joint).name} has none; control={kind} turns actuators into servos, "
            f"which need this gain: a number, or one for each pattern of joint names, {{*_knee: 80, *: 40}}"
        )
    if kind == "position":
        actuator.set_to_position(kp=gain, kv=damping or 0.0)
        actuator.ctrlrange[:] = model.jnt_range[joint]
        actuator.ctrllimited = int(model.jnt_limited[joint])
    else:
        actuator.set_to_velocity(kv=gain)
        actuator.ctrllimited = int(kind_of(model, i) == "velocity" and model.actuator_ctrllimited[i])
        actuator.ctrlrange[:] = np.sort(model.actuator_ctrlrange[i] / (gear or 1.0))
    actuator.forcerange[:] = [-torque, torque]
    actuator.forcelimited = 1
