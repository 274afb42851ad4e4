"""A few seconds of a model in C MuJoCo, with zero and with random actions, from its start."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mujoco
import numpy as np

from rlstable.config.robot import TaskConfig
from rlstable.doctor.lints import Finding, names, short
from rlstable.envs.mujoco_model import without_warnings
from rlstable.robot import actions
from rlstable.robot.model import AT_FLOOR, Robot

_SECONDS = 3.0
_CONTROL = 0.02  # seconds of an action, for a model without a task
_NUDGE = 0.1  # rad/s or m/s, largest velocity at the start with random actions
_DIVERGED = 1e4  # of a velocity, in rad/s or m/s
_FAST = 100.0  # rad/s or m/s of a joint
_FALLEN_HEIGHT, _FALLEN_UPRIGHT = 0.6, 0.5  # shares of the height at home, and cosine of the lean
_SLOW = 1.0  # rad/s or m/s
_LONG = 0.004  # seconds: a time step with which legged robots learn well (docs/lab_log.md)
_SHORTER = (2, 4, 8)  # divisors of the time step that are tried


class Start(NamedTuple):
    """A model at its start, and the controls of actions between -1 and 1."""

    model: mujoco.MjModel
    qpos: np.ndarray
    act: np.ndarray
    controls: Callable[[np.ndarray], np.ndarray]
    substeps: int


class Trial(NamedTuple):
    """A simulation.

    Attributes:
        diverged: Time at which a number was no longer finite, or a velocity far too large; None if none was.
        speed: Greatest speed of each degree of freedom, `[nv]`.
        end: The last state.
    """

    diverged: float | None
    speed: np.ndarray
    end: mujoco.MjData


def of_model(model: mujoco.MjModel) -> Start:
    """A model at `qpos0`, whose actions reach its control ranges, or controls of -1 to 1."""
    low, high = np.where(model.actuator_ctrllimited.astype(bool), model.actuator_ctrlrange.T, [[-1.0], [1.0]])
    zero = np.clip(0.0, low, high)

    def controls(action: np.ndarray) -> np.ndarray:
        return np.asarray(zero + np.where(action < 0, zero - low, high - zero) * action)

    return Start(model, model.qpos0, np.zeros(model.na), controls, max(1, round(_CONTROL / model.opt.timestep)))


def of_robot(robot: Robot, task: TaskConfig) -> Start:
    def controls(action: Any) -> np.ndarray:
        return np.asarray(actions.controls(robot, action, task.actions))

    return Start(robot.model, robot.home, robot.activation, controls, robot.substeps)


def simulate(start: Start, size: float, substeps: int | None = None) -> Trial:
    """Simulates uniform random actions of up to `size`, with so many physics steps of an action; None: the start's."""
    model, substeps = copy.copy(start.model), substeps or start.substeps
    seconds = start.substeps * start.model.opt.timestep
    model.opt.timestep = seconds / substeps
    data, random = mujoco.MjData(model), np.random.default_rng(0)
    data.qpos[:], data.act[:] = start.qpos, start.act
    data.qvel[:] = size * random.uniform(-_NUDGE, _NUDGE, model.nv)
    speed = np.zeros(model.nv)
    with without_warnings():
        for _ in range(round(_SECONDS / seconds)):
            data.ctrl[:] = start.controls(random.uniform(-size, size, model.nu))
            for _ in range(substeps):
                time = float(data.time)
                mujoco.mj_step(model, data)
                speed = np.fmax(speed, np.abs(data.qvel))
                if data.time <= time or not np.abs(data.qvel).max(initial=0.0) < _DIVERGED:  # MuJoCo resets at NaN
                    return Trial(time, speed, data)
    return Trial(None, speed, data)


def trials(start: Start) -> tuple[Trial, Trial]:
    """Zero actions, and random actions."""
    return simulate(start, 0.0), simulate(start, 1.0)


def divergence(start: Start, tried: tuple[Trial, Trial]) -> list[Finding]:
    """Finds a simulation that diverges, and the joint that was the fastest."""
    for what, size, one in zip(("zero", "random"), (0.0, 1.0), tried, strict=True):
        if one.diverged is not None:
            joint = names(start.model, "joint", start.model.dof_jntid[[int(np.argmax(one.speed))]])
            text = f"{what} actions from the start make the simulation diverge after {short(one.diverged)} s"
            return [Finding("error", "time step", joint, text, _remedy(start, size))]
    return []


def findings(robot: Robot, task: TaskConfig) -> Iterator[Finding]:
    start = of_robot(robot, task)
    still, moved = tried = trials(start)
    if diverges := divergence(start, tried):
        yield from diverges
        return
    speed = moved.speed[robot.dof_of_joints]
    fast = np.flatnonzero(speed > _FAST)
    if fast.size:
        text = f"random actions move it at {short(float(speed.max()))} rad/s or m/s"
        advice = "joint damping or armature, or a smaller env.task.actions.scale"
        yield Finding("warning", "speed", tuple(robot.joints[i].name for i in fast), text, advice)
    if robot.floating:
        yield from _does_not_stand(robot, still.end)
    yield from _longer_step(robot, start, float(speed.max(initial=_SLOW)))


def _longer_step(robot: Robot, start: Start, speed: float) -> Iterator[Finding]:
    """A time step with which a robot that walks or drives learns at least twice as fast, if it is stable."""
    steps = math.ceil(robot.control_dt / _LONG - 1e-6)
    if not robot.moves or robot.substeps < 2 * steps:
        return
    tried, longer = simulate(start, 1.0, steps), f"{robot.control_dt / steps:g}"
    if tried.diverged is None and tried.speed[robot.dof_of_joints].max(initial=0.0) < 2 * speed:
        what = f"a robot learns faster with a time step of {longer} s, which is stable here"
        advice = f"env.task.physics.timestep={longer}; rlstable play has the model's own"
        yield Finding("note", "time step", (), what, advice)


def _remedy(start: Start, size: float) -> str:
    """Advice on a simulation that diverges, with a time step that does not diverge, if there is one."""
    step = float(start.model.opt.timestep)
    stable = [n for n in _SHORTER if simulate(start, size, n * start.substeps).diverged is None]
    if stable:
        return f"timestep {step / stable[0]:g} s, which is stable here, or more armature, or less stiffness"
    return f"more armature, less stiffness, or larger masses; timestep {step / _SHORTER[-1]:g} s diverges, too"


def _does_not_stand(robot: Robot, end: mujoco.MjData) -> Iterator[Finding]:
    height = float(end.xpos[robot.root, 2]) - robot.floor
    share = height / robot.home_height if robot.home_height > AT_FLOOR else 1.0
    upright = -float(robot.down @ end.xmat[robot.root].reshape(3, 3) @ robot.up_axis)
    if share >= _FALLEN_HEIGHT and upright >= _FALLEN_UPRIGHT:
        return
    leaning = f"leans to {np.degrees(np.arccos(np.clip(upright, -1, 1))):.0f} degrees"
    sinks = f"sinks to {100 * max(share, 0.0):.0f} % of its height"
    what = f"with zero actions the robot does not stay at home: it {sinks} and {leaning} within {_SECONDS:g} s"
    if all(actuator.kind == "position" for actuator in robot.actuators):
        advice = "a keyframe home that stands, with ctrl, or stiffer servos; robot_getup starts from any pose"
        yield Finding("warning", "standing", (), what, advice)
        return
    advice = "nothing, if the motors are torques; for servos: env.task.actions.control=position, stiffness and damping"
    yield Finding("note", "standing", (), what, advice)
