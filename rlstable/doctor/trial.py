"""A few seconds of a robot in C MuJoCo, with zero and with random actions, from home."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import mujoco
import numpy as np

from rlstable.config.robot import TaskConfig
from rlstable.doctor.lints import Finding, short
from rlstable.envs.mujoco_model import without_warnings
from rlstable.robot import actions
from rlstable.robot.model import AT_FLOOR, Robot

_SECONDS = 3.0
_DIVERGED = 1e4  # of a velocity, in rad/s or m/s
_FAST = 100.0  # rad/s or m/s of a joint
_FALLEN_HEIGHT, _FALLEN_UPRIGHT = 0.6, 0.5  # shares of the height at home, and cosine of the lean
_SLOW = 1.0  # rad/s or m/s
_LONG = 0.004  # seconds: a time step with which legged robots learn well (docs/lab_log.md)
_SHORTER = (2, 4, 8)  # divisors of the time step that are tried
_LAST = 0.5  # seconds at the end of a trial that say whether the robot stands


class Trial(NamedTuple):
    """A simulation from home.

    Attributes:
        diverged: Time at which a number was no longer finite, or a velocity far too large; None if none was.
        speed: Greatest speed of each joint, `[joints]`.
        lowest: Least height of the root body in the last half second, as a share of its height at home.
        upright: Least cosine of the root body's lean in the last half second.
    """

    diverged: float | None
    speed: np.ndarray
    lowest: float
    upright: float


def simulate(robot: Robot, task: TaskConfig, size: float, substeps: int | None = None) -> Trial:
    """Simulates uniform random actions of up to `size`, with so many physics steps of an action; None: the robot's."""
    model, substeps = copy.copy(robot.model), substeps or robot.substeps
    model.opt.timestep = robot.control_dt / substeps
    data, random = mujoco.MjData(model), np.random.default_rng(0)
    data.qpos[:], data.act[:] = robot.home, robot.activation
    speed, lowest, upright = np.zeros(len(robot.joints)), np.inf, 1.0
    with without_warnings():
        for _ in range(round(_SECONDS / robot.control_dt)):
            data.ctrl[:] = actions.controls(robot, random.uniform(-size, size, model.nu), task.actions)
            for _ in range(substeps):
                time = float(data.time)
                mujoco.mj_step(model, data)
                if data.time <= time or not np.abs(data.qvel).max(initial=0.0) < _DIVERGED:  # MuJoCo resets at NaN
                    return Trial(time, speed, lowest, upright)
                speed = np.maximum(speed, np.abs(data.qvel[robot.dof_of_joints]))
            if data.time > _SECONDS - _LAST:
                height = float(data.xpos[robot.root, 2]) - robot.floor
                lowest = min(lowest, height / robot.home_height if robot.home_height > AT_FLOOR else 1.0)
                upright = min(upright, -float(robot.down @ data.xmat[robot.root].reshape(3, 3) @ robot.up_axis))
    return Trial(None, speed, lowest, upright)


def findings(robot: Robot, task: TaskConfig) -> Iterator[Finding]:
    still, moved = simulate(robot, task, 0.0), simulate(robot, task, 1.0)
    for what, size, tried in (("zero", 0.0, still), ("random", 1.0, moved)):
        if tried.diverged is not None:
            text = f"{what} actions from home make the simulation diverge after {short(tried.diverged)} s"
            yield Finding("error", "time step", (), text, _remedy(robot, task, size))
            return
    fast = np.flatnonzero(moved.speed > _FAST)
    if fast.size:
        text = f"random actions move it at {short(float(moved.speed.max()))} rad/s or m/s"
        advice = "joint damping or armature, or a smaller env.task.actions.scale"
        yield Finding("warning", "speed", tuple(robot.joints[i].name for i in fast), text, advice)
    if robot.floating and (still.lowest < _FALLEN_HEIGHT or still.upright < _FALLEN_UPRIGHT):
        yield _does_not_stand(robot, still)
    yield from _longer_step(robot, task, moved)


def _longer_step(robot: Robot, task: TaskConfig, moved: Trial) -> Iterator[Finding]:
    """A time step with which a robot that walks or drives learns at least twice as fast, if it is stable."""
    steps = math.ceil(robot.control_dt / _LONG - 1e-6)
    if not robot.moves or robot.substeps < 2 * steps:
        return
    tried, longer = simulate(robot, task, 1.0, steps), f"{robot.control_dt / steps:g}"
    if tried.diverged is None and tried.speed.max(initial=0.0) < 2 * moved.speed.max(initial=_SLOW):
        what = f"a robot learns faster with a time step of {longer} s, which is stable here"
        advice = f"env.task.physics.timestep={longer}; rlstable play has the model's own"
        yield Finding("note", "time step", (), what, advice)


def _remedy(robot: Robot, task: TaskConfig, size: float) -> str:
    """Advice on a simulation that diverges, with a time step that does not diverge, if there is one."""
    step = float(robot.model.opt.timestep)
    stable = [n for n in _SHORTER if simulate(robot, task, size, n * robot.substeps).diverged is None]
    if stable:
        return f"timestep {step / stable[0]:g} s, which is stable here, or more armature, or less stiffness"
    return f"more armature, less stiffness, or larger masses; timestep {step / _SHORTER[-1]:g} s diverges, too"


def _does_not_stand(robot: Robot, still: Trial) -> Finding:
    held = all(actuator.kind == "position" for actuator in robot.actuators)
    leaning = f"leans to {np.degrees(np.arccos(np.clip(still.upright, -1, 1))):.0f} degrees"
    sinks = f"sinks to {100 * max(still.lowest, 0.0):.0f} % of its height"
    what = f"with zero actions the robot does not stay at home: it {sinks} and {leaning} within {_SECONDS:g} s"
    if held:
        advice = "a keyframe home that stands, with ctrl, or stiffer servos; robot_getup starts from any pose"
        return Finding("warning", "standing", (), what, advice)
    advice = "nothing, if the motors are torques; for servos: env.task.actions.control=position, stiffness and damping"
    return Finding("note", "standing", (), what, advice)
