"""Mistakes in the model file of a robot or in its task: one line that names the key, before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from moments import ACROBOT, MODELS, PARTS, ROBOT, SERVOS, config

from rlstable.config import ConfigError
from rlstable.envs.load import load


def mistake(path: Path, task: str, *words: str) -> str:
    """The error line of a task for a model file, with a line break at its end."""
    with pytest.raises(ConfigError) as caught:
        load(config(task, "arm", *words, f"env.xml={path}").env)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "{path}") + "\n"


def vector(robot: Any, data: Any, past: Any, action: Any) -> jax.Array:
    return jnp.zeros(3)


def broken(robot: Any, data: Any, past: Any, action: Any) -> jax.Array:
    raise KeyError("speed")


SERVO = "env.task.actions.control=position env.task.actions.damping=2 env.task.actions.stiffness"
KEYFRAMES = "env.task.reset.home=null +env.task.reset.keyframes"
FORWARD = "env.task.commands.velocity.forward"
# Task, model and further words; start of the line after `env.task.`, or the whole line if it ends with a line break.
TASKS = [
    (f"robot quadruped {SERVO}={{*_knee:80}}", "actions.stiffness: joint front_left_abduction has none; "),
    (f"robot quadruped {SERVO}={{*_kene:80}}", "actions.stiffness: the model has no joint '*_kene'; it has "),
    ("robot hopper env.task.actions.control=position", "actions.stiffness: joint hip has none; control=position "),
    ("robot arm env.task.actions.force=2", "actions.force: needs another control than auto"),
    ("robot quadruped env.task.keyframe=sit", "keyframe: the model has no keyframe 'sit'; it has home"),
    ("robot_velocity arm", "commands.velocity: needs a root body that moves"),
    ("robot_reach arm env.task.control_dt=0.004", "control_dt: 0.004 is less than a time step (0.005)"),
    ("robot_reach quadruped", "commands.pose.site: imu does not move with the joints, so every target would be"),
    ("robot quadruped +env.task.endings.contact={geoms:[belly]}", "endings.contact.geoms: no geom or body 'belly'"),
    ("robot arm env.task.physics.contacts=feet", "physics.contacts: the robot has no feet that touch the floor; "),
    ("robot arm env.task.physics.timestep=0.003", "physics.timestep: must divide control_dt=0.02"),
    ("robot quadruped env.task.free_base=true", "free_base: the model has a free joint already; set env.task.free_b"),
    ("robot cart_pole env.task.free_base=true", "free_base: the model moves its first body"),
    ("robot arm env.task.home={knee:1}", "home: the model has no joint 'knee'; it has "),
    (f"robot quadruped {KEYFRAMES}={{names:[]}}", "reset.keyframes.names: tuple should have at least 1 item"),
    (f"robot quadruped {KEYFRAMES}={{names:[sitting]}}",
     "reset.keyframes.names: the model has no keyframe 'sitting'; it has home\n"),
    ("robot_rough quadruped env.task.floor=never", "terrain: is a floor, and floor=never"),
    ("robot_rough quadruped env.task.terrain=null", "observations.height_scan: needs uneven ground"),
    ("robot_rough quadruped env.task.terrain.platform=0.5", "terrain.platform: the robot is 0.79 m wide"),
    ("robot_rough quadruped env.task.terrain.size=3", "terrain.platform: must be at most half of size=3"),
    ("robot_rough quadruped env.task.terrain.columns=3", "terrain.columns: 3 columns leave none for"),
    ("robot_rough quadruped env.task.terrain.tiles.rough.range=null", "terrain.tiles: rough needs a range"),
    ("robot_rough quadruped +env.task.terrain.tiles.lava={weight:1}", "terrain.tiles"),
    ("robot_rough hopper", "terrain: needs a root body with a free joint"),
    (f"robot_velocity quadruped {FORWARD}=[[0,0.2],[1,-0.5],10]",
     "commands.velocity.forward: [1, -0.5] is reversed; write the lower number first: [-0.5, 1]\n"),
    (f"robot_velocity quadruped {FORWARD}=[[0,0.2],[0,1],0]",
     "commands.velocity.forward: steps: input should be greater than 0, got 0\n"),
    ("robot quadruped +env.task.rewards.uprigth={weight:1}",
     "rewards.uprigth: there is no term 'uprigth'; did you mean upright?"),
    ("robot quadruped +env.task.rewards.height.widht=1", "rewards.height.widht: unknown key; did you mean width?"),
    ("robot quadruped +env.task.rewards.height.width=-1",
     "rewards.height.width: input should be greater than 0, got -1"),
    (f"robot quadruped {SERVO}=-1", "actions.stiffness: input should be greater than 0, got -1"),
    ("robot quadruped env.task.rewards.upright.weight=much",
     "rewards.upright.weight: 'much' must be a number, not text"),
    ("robot quadruped +env.task.rewards.slip={}", "rewards.slip.weight: is missing; set it"),
    ("robot quadruped env.task.actions.delay=[2,0]",
     "actions.delay: [2, 0] is reversed; write the lower number first: [0, 2]"),
    ("robot quadruped +env.task.commands.velocity={forward:[1,-1],sideways:[0,0],turn:[0,0]}",
     "commands.velocity.forward: [1, -1] is reversed"),
    ("robot quadruped +env.task.reset.random={}", "reset: has 2 terms; it must have one"),
    ("robot quadruped +env.task.rewards.track_linear_velocity={weight:1}",
     "rewards.track_linear_velocity: needs the command velocity; add env.task.commands.velocity"),
    ("robot quadruped +env.task.rewards.mine={term:'no_such_module:f',weight:1}",
     "rewards.mine: no module 'no_such_module'"),
    ("robot quadruped +env.task.rewards.mine={term:'test_robot_mistakes:vector',weight:1}",
     "rewards.mine: returns shape (3,); it must return a number"),
    ("robot quadruped +env.task.rewards.mine={term:'test_robot_mistakes:broken',weight:1}",
     "rewards.mine: raises KeyError: 'speed'"),
    ("robot quadruped +env.task.observations.sensor={name:compass}",
     "observations.sensor.name: the model has no sensor 'compass'; it has gyro, accelerometer"),
    ("robot hopper env.task.randomization.mass=[1.2,0.8]", "randomization.mass: [1.2, 0.8] is reversed"),
    ("robot hopper env.task.randomization.mass=[0,1]",
     "randomization.mass: [0, 1] are factors; both must be above 0"),
    ("robot hopper env.task.randomization.mas=[0.8,1]", "randomization.mas: names what the task does not have yet"),
    (f"robot_velocity quadruped {FORWARD}=[0,1,10]", "commands.velocity.forward: must be a list, [a, b], got 0\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), TASKS, ids=[message.strip() for _, message in TASKS])
def test_task_that_does_not_fit_the_model_is_one_line_that_names_the_key(words: str, message: str) -> None:
    task, model, *more = words.split()
    assert mistake(MODELS / f"{model}.xml", task, *more).startswith(f"env.task.{message}")


TEXTS = {"acrobot": ACROBOT, "walker": ROBOT.format(**PARTS)}
TWO_MOTORS = '<motor joint="elbow" ctrlrange="-5 5"/>', '<motor joint="elbow"/><motor joint="shoulder"/>'
BASE = '<body name="base_footprint"><freejoint/><geom size=".1" pos="0 0 .1"/><body name="upper" pos="0 0 .1">'
ON_THE_FLOOR = [
    ('<body name="upper" pos="0 0 2">', BASE), ("</worldbody>", "</body></worldbody>"),
    ("0 0 0 0 0 -1", "0 0 0 0 0 1"), ('pos="0 0 -1"', 'pos="0 0 1"'),
]  # fmt: skip
ACTUATORS = [("<actuator>", "<!--"), ("</actuator>", "-->")]
ITSELF = '<asset><model name="m" file="robot.xml"/></asset><worldbody><attach model="m" prefix="x"/>'
USERS = '<general name="slow" joint="neck" dyntype="user" actdim="2" ctrlrange="0 1"/>'


def keyframe(text: str) -> tuple[str, str]:
    return "</mujoco>", f"<keyframe><key {text}/></keyframe></mujoco>"


def timestep(text: str) -> list[tuple[str, str]]:
    return [("<worldbody>", f'<option timestep="{text}"/><worldbody>')]


# Task, model and further words; edits of the model's text; the line as above.
FILES = [
    ("robot quadruped env.backend=spring", [],
     "env.backend: spring is for Brax's environments; choose auto, native or mjx for env=robot"),
    ("robot hopper env.task.randomization.mass=[0.8,1.2] env.randomization_fn=ball:each_its_own", [],
     "env.randomization_fn: must be null with env.task.randomization"),
    ("robot_swingup cart_pole", ACTUATORS, "env.xml: {path} has no actuator; add <actuator>"),
    ("robot_swingup cart_pole", [("</mujoco>", "")], "env.xml: {path} cannot be read: XML parse error"),
    ("robot_swingup cart_pole", [("<worldbody>", '<asset><mesh file="link.stl"/></asset><worldbody>')],
     "env.xml: {path} cannot be compiled: Error: Error opening file 'link.stl'"),
    ("robot_swingup cart_pole", [keyframe('name="home" qpos="0 0 0"')],
     "env.xml: {path} cannot be compiled: Error: keyframe 'home': invalid qpos size, expected 2, got 3"),
    ("robot_swingup cart_pole", [('range="-1.8 1.8"', 'range="2 -2"')],
     "env.xml: {path}: range of joint slider is reversed, [2, -2]; write the lower number first"),
    ("robot_velocity hopper", [('condim="3"', 'contype="0" conaffinity="0"')],
     "env.task.rewards.short_steps: needs feet, geoms that can collide and touch the floor at home, and this model has "
     "none; remove the term: env.task.rewards.short_steps=null\n"),
    ("robot_swingup acrobot", [TWO_MOTORS, keyframe('name="home" qpos="0.1"')],
     "env.xml: {path}: qpos of keyframe home has 1 numbers, and the model has 2"),
    ("robot_swingup acrobot", [TWO_MOTORS, keyframe('name="home" qpos="0.1 0.2" ctrl="1"')],
     "env.xml: {path}: ctrl of keyframe home has 1 numbers, and the model has 2"),
    ("robot_velocity acrobot env.task.free_base=true",
     [('<joint name="shoulder" axis="0 1 0"/>', ""), keyframe('name="home" qpos="0.1"')],
     "env.xml: {path}: qpos of keyframe home has 1 numbers, and the model has 8; a free joint has 7 in qpos, also the "
     "one of env.task.free_base\n"),
    ("robot_stand acrobot", ON_THE_FLOOR,
     "env.task.rewards.height.share: the root body base_footprint is 0 m above the floor at home"),
    ("robot_reach arm", [keyframe('name="up" qpos="0 nan"')],
     "env.xml: {path} has a NaN or an infinity in key_qpos; correct that number\n"),
    ("robot_reach arm", [('<site name="hand" pos="0 0 0.25"/>', ""), (' name="upper"', ""), (' name="lower"', "")],
     "env.task.commands.pose.site: the model has no site; name the body"),
    (f"robot arm {SERVO}=30", ACTUATORS,
     "env.task.actions.force: joint shoulder has no largest force"),
    ("robot walker", [('pos="0 0 0.1"', 'pos="0 nan 0.1"')],
     "env.xml: {path} has a NaN or an infinity in body_pos; correct that number"),
    ("robot walker", [('kp="30"', 'kp="nan"')],
     "env.xml: {path} has a NaN or an infinity in actuator_gainprm; correct that number"),
    ("robot walker", [(SERVOS, USERS)],
     "env.xml: actuator slow has a state that tasks do not know (mjDYN_USER); known are"),
    ("robot acrobot", timestep("0"), "env.xml: {path} has a time step of 0 s; set timestep of <option> "),
    ("robot acrobot", timestep("-0.01"), "env.xml: {path} has a time step of -0.01 s; set timestep of <option> "),
    ("robot acrobot", timestep("1e-12"), "env.xml: {path} has a time step of 1e-12 s; set timestep of <option> "),
    ("robot acrobot", timestep("nan"), "env.xml: {path} has a time step of nan s; set timestep of <option> "),
    ("robot acrobot", [('name="upper"', 'name="b\udcff"')],
     "env.xml: {path} cannot be read: 'utf-8' codec can't decode byte"),
    ("robot acrobot", [("<worldbody>", '<include file="robot.xml"/><worldbody>')], "env.xml: {path} cannot be read: "),
    ("robot acrobot", [("<worldbody>", ITSELF)],
     "env.xml: {path} crashes MuJoCo; it may be damaged, attach or include itself"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "edits", "message"), FILES, ids=[message.strip() for *_, message in FILES])
def test_model_file_that_does_not_fit_the_task_is_one_line(
    words: str, edits: list[tuple[str, str]], message: str, tmp_path: Path
) -> None:
    task, model, *more = words.split()
    text, path = TEXTS.get(model) or (MODELS / f"{model}.xml").read_text(), tmp_path / "robot.xml"
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, errors="surrogateescape")
    assert mistake(path, task, *more).startswith(message)
