"""Robots of the tests' models, and single moments of them to call terms on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from rlstable.cli.compose import compose
from rlstable.config import Config
from rlstable.robot.environment import RobotEnv
from rlstable.robot.model import Robot
from rlstable.robot.past import Past

MODELS = Path(__file__).parent / "robot" / "models"
HOME_HEIGHT = 0.4 * np.cos(0.8) + 0.022  # of the quadruped's trunk: thighs, shins and the radius of a foot


@functools.cache
def config(task: str, model: str, *words: str) -> Config:
    """The configuration of a ready task for a model of the tests."""
    return compose([f"env={task}", f"env.xml={MODELS / model}.xml", *words])


def environment(task: str, model: str, *words: str) -> RobotEnv:
    """The environment of a task, without physics of MJX."""
    env = config(task, model, *words).env
    return RobotEnv(env.xml, env.task)


def built(task: str, path: Path | str, *words: str, **more: Any) -> Robot:
    """The robot of a task for any model file."""
    env = config(task, "arm", *words, f"env.xml={path}").env
    return Robot(env.xml, env.task, **more)


@functools.cache
def robot(model: str, *needs: str, touching: tuple[str, ...] = (), words: tuple[str, ...] = ()) -> Robot:
    env = config("robot", model, *words).env
    return Robot(env.xml, env.task, dict.fromkeys(touching, "geoms"), needs)


def saved(folder: Path, text: str) -> Path:
    path = folder / "robot.xml"
    path.write_text(text)
    return path


GROUND = '<geom name="ground" type="plane" size="5 5 0.1"/>'
SHIN = 'type="capsule" size="0.02" fromto="0 0 0 0 0 -0.2"'
LEG = f'<body name="{{0}}"><joint name="{{0}}" axis="0 1 0"/><geom name="{{0}}" {SHIN}/></body>'
ROBOT = """<mujoco><compiler autolimits="true"/><option timestep="0.004" gravity="{gravity}"/>
<default><joint range="-45 45"/></default><worldbody>{ground}<body name="trunk" pos="0 0 {height}"><freejoint/>
<geom type="box" size="0.2 0.1 0.04"/><site name="middle"/><body name="head" pos="0 0 0.1"><joint name="neck"/>
<geom name="head" size="0.05"/><site name="front"/></body>{legs}</body>{more}</worldbody>
<actuator>{actuators}</actuator><sensor>{sensors}</sensor></mujoco>"""
SERVOS = "".join(f'<position joint="{name}" kp="30" ctrlrange="-0.8 0.8"/>' for name in ("neck", "a", "b"))


PARTS = {
    "gravity": "0 0 -9.81", "ground": GROUND, "height": "0.22", "legs": LEG.format("a") + LEG.format("b"), "more": "",
    "actuators": SERVOS, "sensors": "",
}  # fmt: skip
LINK = '<geom type="capsule" fromto="0 0 0 0 0 -1" size=".05"/>'
ACROBOT = f"""<mujoco><worldbody>
  <body name="upper" pos="0 0 2"><joint name="shoulder" axis="0 1 0"/>{LINK}
  <body name="lower" pos="0 0 -1"><joint name="elbow" axis="0 1 0"/>{LINK}</body></body></worldbody>
  <actuator><motor joint="elbow" ctrlrange="-5 5"/></actuator></mujoco>"""


def walker(folder: Path, *words: str, needs: tuple[str, ...] = (), **parts: str) -> Robot:
    return built("robot", saved(folder, ROBOT.format(**PARTS | parts)), *words, needs=needs)


class Moment(NamedTuple):
    """The arguments of a term."""

    robot: Robot
    data: Any
    past: Past
    action: jnp.ndarray


def moment(robot: Robot, qpos: Any = None, qvel: Any = None, ctrl: Any = None, **past: Any) -> Moment:
    """A moment of a robot, at home and at rest unless given; `past` replaces parts of an empty past."""
    actuators, feet = len(robot.actuators), len(robot.feet)
    empty = Past(
        rng=jnp.zeros(2, jnp.uint32), steps=jnp.zeros(()), command={}, actions=jnp.zeros((2, actuators)),
        delay=jnp.int32(0), filtered=jnp.zeros(actuators), contact=jnp.zeros(feet), air_time=jnp.zeros(feet),
        landed_after=jnp.zeros(feet), foot_positions=jnp.zeros((feet, 3)), foot_velocities=jnp.zeros((feet, 3)),
        history={}, lags={},
    )  # fmt: skip
    past = {
        name: {key: jnp.asarray(x) for key, x in value.items()} if isinstance(value, dict) else jnp.asarray(value)
        for name, value in past.items()
    }
    return Moment(robot, robot.forward(qpos, qvel, ctrl), empty.replace(**past), jnp.zeros(actuators))


def turned(robot: Robot, axis: int, degrees: float, lift: float = 0.0) -> np.ndarray:
    """Positions at home with the free root body turned about an axis of the world, and lifted."""
    qpos = robot.home.copy()
    half = np.radians(degrees) / 2
    qpos[3:7] = 0.0
    qpos[3], qpos[4 + axis] = np.cos(half), np.sin(half)
    qpos[2] += lift
    return qpos
