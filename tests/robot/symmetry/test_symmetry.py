"""The mirror of a robot's task: pairs found in the model, rules of the terms, and robots that have no mirror image."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from commands import SIZES, SMALLEST, typed
from moments import MODELS, environment

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.device.reflection import Mirror
from rlstable.envs.load import load
from rlstable.robot.environment import RobotEnv
from rlstable.robot.symmetry.mirror import mirror_of
from rlstable.robot.symmetry.pairs import Pairs
from rlstable.robot.terms import mirrors
from rlstable.runner.setup import _mirror_of
from rlstable.train import main

QUADRUPED = (MODELS / "quadruped.xml").read_text()
SWAPPED = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]  # left and right legs
LEGS = [-1.0, 1.0, 1.0] * 4  # abductions change their sign


def task(path: Path | str, *words: str) -> RobotEnv:
    return environment("robot_velocity", "quadruped", f"env.xml={path}", *words)


@functools.cache
def mirror(*words: str) -> Mirror:
    return mirror_of(environment("robot_velocity", "quadruped", *words))


def test_legs_of_the_quadruped_are_swapped_and_abductions_change_their_sign() -> None:
    np.testing.assert_array_equal(mirror().action.order, SWAPPED)
    np.testing.assert_array_equal(mirror().action.sign, LEGS)


def test_each_term_of_the_quadrupeds_observation_is_mirrored_by_its_rule() -> None:
    reflection = mirror().observations["state"]
    # Positions and velocities of the joints, gravity, gyro, last action and command.
    signs = [*LEGS, *LEGS, 1, -1, 1, -1, 1, -1, *LEGS, 1, -1, -1]
    np.testing.assert_array_equal(reflection.sign, signs)
    order = [*SWAPPED, *(12 + np.array(SWAPPED)), *range(24, 30), *(30 + np.array(SWAPPED)), 42, 43, 44]
    np.testing.assert_array_equal(reflection.order, order)


def test_planar_hopper_is_its_own_mirror_image() -> None:
    own = mirror_of(environment("robot", "hopper"))
    np.testing.assert_array_equal(own.action.order, range(3))
    np.testing.assert_array_equal(own.action.sign, np.ones(3))
    joints = own.observations["state"]
    np.testing.assert_array_equal(joints.order[:6], range(6))
    np.testing.assert_array_equal(joints.sign[:8], [1, 1, 1, 1, 1, 1, 1, -1])  # the last one is of gravity


MANY = (
    "+env.task.observations.joint_positions.history=3", "+env.task.observations.phase={}",
    "+env.task.observations.contact={geoms: [front_left_foot, rear_right_shin, front_right_foot, rear_left_shin]}",
    "+env.task.observations.left={term: contact, geoms: [rear_left_foot]}",
    "+env.task.observations.right={term: contact, geoms: [rear_right_foot]}",
    "+env.task.observations.imu={term: site_position, site: imu}",
    "+env.task.observations.gyro_by_name={term: sensor, name: gyro}",
    "+env.task.critic_observations={height: {}, linear_velocity: {}, foot_contacts: {}, accelerometer: {}}",
)  # fmt: skip


@pytest.mark.parametrize("words", [(), MANY])
def test_mirror_image_of_the_mirror_image_is_the_original(words: tuple[str, ...]) -> None:
    own = mirror(*words)
    for reflection in (*own.observations.values(), own.action):
        x = np.arange(1.0, len(reflection.order) + 1)
        np.testing.assert_array_equal(reflection(reflection(x)), x)


def test_terms_that_show_one_side_are_mirrored_by_the_terms_of_the_other_side() -> None:
    env = environment("robot_velocity", "quadruped", *MANY)
    own, starts, place = mirror(*MANY), {}, 0
    for part in env.observers["state"].parts:
        starts[part.name], place = place, place + part.size * part.config.history
    order, signs = own.observations["state"]
    assert order[starts["left"]] == starts["right"] and order[starts["right"]] == starts["left"]
    contacts = slice(starts["contact"], starts["contact"] + 4)
    np.testing.assert_array_equal(order[contacts] - starts["contact"], [2, 3, 0, 1])
    np.testing.assert_array_equal(order[:36], [*SWAPPED, *(12 + np.array(SWAPPED)), *(24 + np.array(SWAPPED))])
    assert signs[starts["phase"]] == signs[starts["phase"] + 1] == -1  # half a cycle later
    privileged = own.observations["privileged_state"]
    np.testing.assert_array_equal(privileged.sign[place:], [1, -1, 1, 1, 1, 1, 1, 1, 1, -1, 1])
    np.testing.assert_array_equal(privileged.order[place + 4 : place + 8] - place, [5, 4, 7, 6])


def test_observation_of_the_mirrored_state_is_the_mirrored_observation_after_many_steps() -> None:
    """On C MuJoCo, with the whole environment: history, commands, last actions and contacts."""
    words = (*MANY, "env.task.reset.home={position: 0, velocity: 0}", "env.backend=native")
    config = compose(["env=robot_velocity", f"env.xml={MODELS / 'quadruped.xml'}", *words, "ppo.symmetry=auto"])
    env = load(config.env).env
    own, _ = _mirror_of(env, config.ppo.symmetry, 1, config.network)
    assert own is not None
    step = jax.jit(env.step)
    one = jax.jit(env.reset)(jax.random.PRNGKey(0))
    past = one.info["memory"]
    command = {name: x * jnp.array([1.0, -1.0, -1.0]) for name, x in past.command.items()}
    other = one.replace(info={**one.info, "memory": past.replace(command=command)})
    keys = jax.random.split(jax.random.PRNGKey(1), 20)
    for key in keys:
        action = jax.random.uniform(key, (12,), minval=-1, maxval=1)
        one, other = step(one, action), step(other, own.action(action))
    image = own.observation(one.obs)
    for key, tolerance in (("state", 1e-4), ("privileged_state", 1e-3)):
        names = [p.name for p in env.unwrapped.observers[key].parts for _ in range(p.size * p.config.history)]
        kept = np.array([name != "phase" for name in names])  # the image of the clock is half a cycle later
        np.testing.assert_allclose(image[key][kept], other.obs[key][kept], atol=tolerance)
    np.testing.assert_allclose(one.reward, other.reward, rtol=1e-4)


def test_step_of_the_mirrored_quadruped_is_the_mirrored_step() -> None:
    env = environment("robot_velocity", "quadruped")
    own, random = Pairs(env.robot), np.random.default_rng(0)
    qpos = env.robot.home + 0.1 * random.normal(size=19)
    home = env.robot.of_actuators("home")
    qvel, ctrl = random.normal(size=18), home + 0.3 * random.normal(size=12)
    results = []
    for state in ((qpos, qvel, ctrl), (own.qpos(qpos), own.dofs(qvel), home + own.actuators(ctrl - home))):
        data = mujoco.MjData(env.robot.model)
        data.qpos[:], data.qvel[:], data.ctrl[:] = state
        mujoco.mj_step(env.robot.model, data, 5)
        results.append((data.qpos.copy(), data.qvel.copy()))
    np.testing.assert_allclose(own.qpos(results[0][0]), results[1][0], atol=1e-9)
    np.testing.assert_allclose(own.dofs(results[0][1]), results[1][1], atol=1e-7)


def test_pairs_are_found_without_names_of_sides() -> None:
    """The ant's joints are numbered."""
    own = mirror_of(task(str(resources.files("brax.envs.assets") / "ant.xml")))
    np.testing.assert_array_equal(own.action.order, [2, 3, 0, 1, 6, 7, 4, 5])


def test_stacked_observations_are_mirrored_step_by_step() -> None:
    words = ["env=robot", f"env.xml={MODELS / 'hopper.xml'}", "env.history=2", "ppo.symmetry=auto"]
    config = compose(words)
    own, _ = _mirror_of(load(config.env).env, config.ppo.symmetry, 2, config.network)
    plain = mirror_of(environment("robot", "hopper"))
    assert own is not None
    np.testing.assert_array_equal(own.observations["state"].sign, np.tile(plain.observations["state"].sign, 2))


def changed(tmp_path: Path, old: str, new: str) -> str:
    """The quadruped with the first occurrence of a text replaced."""
    assert old in QUADRUPED
    path = tmp_path / "robot.xml"
    path.write_text(QUADRUPED.replace(old, new, 1))
    return str(path)


SHIN = '<body name="front_left_shin" pos="0 0 -0.2">'
COUPLED = (
    '<equality><joint joint1="front_left_knee" joint2="front_left_hip" polycoef="-3.2 -2 0 0 0"/></equality><sensor>'
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (SHIN, SHIN.replace("-0.2", "-0.22"), "body front_left_shin has no mirror image at home"),
        ('size="0.022" mass="0.05"', 'size="0.022" mass="0.08"',
         "a step of the mirrored robot is not"),
        ('size="0.022" mass="0.05"', 'size="0.022" mass="0.06"', "a step of the mirrored robot is not"),
        ('pos="0 0 -0.2" size="0.022"', 'pos="0 0 -0.19" size="0.022"', "geom front_left_foot of"),
        ('class="knee"/>\n            <geom', 'class="knee" damping="0.4"/>\n            <geom',
         "a step of the mirrored robot is not"),
        ('class="hip" joint="rear_left_hip"', 'class="hip" kp="60" joint="rear_left_hip"',
         "a step of the mirrored robot is not"),
        ('size="0.022" mass="0.05"', 'size="0.03" mass="0.05"', "a step of the mirrored robot is not"),
        ('<site name="imu"/>', '<site name="imu" euler="0 0 0.7"/>', "env.task.observations.gyro: sensor gyro"),
        ("<sensor>", COUPLED, "a step of the mirrored robot is not the mirrored step: joint "),
    ],
)  # fmt: skip
def test_robot_that_differs_from_its_mirror_image_is_refused_by_name(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        mirror_of(task(changed(tmp_path, old, new)))
    assert str(error.value).startswith(f"ppo.symmetry: {message}") and "\n" not in str(error.value)


def test_robot_whose_sides_differ_by_a_measurement_has_a_mirror_image(tmp_path: Path) -> None:
    heavier = changed(tmp_path, 'size="0.022" mass="0.05"', 'size="0.022" mass="0.054"')  # 1.6 % of the shin
    np.testing.assert_array_equal(mirror_of(task(heavier)).action.order, SWAPPED)


@pytest.mark.parametrize(
    ("old", "words", "reason"),
    [
        ('size="0.022" mass="0.05"', (), "ppo.symmetry: a step of the mirrored robot is not"),
        (None, ("network.recurrent=gru",), "the memory of a GRU has no mirror image"),
    ],
)
def test_robot_without_a_mirror_image_trains_without_it_if_that_is_allowed(
    old: str | None, words: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    path = MODELS / "quadruped.xml" if old is None else changed(tmp_path, old, old.replace("0.05", "0.08"))
    config = compose(["env=robot_velocity", f"env.xml={path}", "ppo.symmetry=if_symmetric", *words])
    own, why = _mirror_of(task(path), config.ppo.symmetry, 1, config.network)
    assert own is None and why is not None and why.startswith(reason)


def test_mirror_image_is_used_if_symmetric_and_not_if_the_robot_is_planar() -> None:
    for model, reason in (("quadruped", None), ("hopper", "the robot moves in a plane")):
        path = MODELS / f"{model}.xml"
        config = compose(["env=robot_velocity", f"env.xml={path}"])
        own, why = _mirror_of(task(path), config.ppo.symmetry, 1, config.network)
        assert (own is None, why) == (reason is not None, reason)


def test_run_says_why_it_does_not_learn_from_mirror_images(tmp_path: Path, quick_compile: None) -> None:
    words = ["env=robot_velocity", f"env.xml={MODELS / 'hopper.xml'}", "ppo=default", "total_steps=128", *SIZES]
    assert typed(main, *words, "eval.num_evals=0", f"hydra.run.dir={tmp_path}") == 0
    assert (
        '"kind": "symmetry_not_used", "because": "the robot moves in a plane"'
        in (tmp_path / "events.jsonl").read_text()
    )


def size_of_actions(robot: Any, data: Any, past: Any, action: jax.Array) -> jax.Array:
    return (past.actions.at[0].set(0.0) ** 2).sum()


def test_term_that_needs_the_arrays_of_jax_has_a_mirror_image() -> None:
    words = "+env.task.rewards.own={term: 'test_symmetry:size_of_actions', weight: 1}"
    path = MODELS / "quadruped.xml"
    config = compose(["env=robot_velocity", f"env.xml={path}", words])
    own, why = _mirror_of(task(path, words), config.ppo.symmetry, 1, config.network)
    assert own is not None and why is None


def lean(robot: Any, data: Any, past: Any, action: jax.Array) -> jax.Array:
    return -robot.rotation(data)[2, :2]


@mirrors("vector")
def down(robot: Any, data: Any, past: Any, action: jax.Array) -> jax.Array:
    return -robot.rotation(data)[2]


@mirrors("scalar")
def wrong(robot: Any, data: Any, past: Any, action: jax.Array) -> jax.Array:
    return -robot.rotation(data)[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ('observations.lean={term: "test_symmetry:lean"}', "env.task.observations.lean: has no mirror rule"),
        (
            'observations.wrong={term: "test_symmetry:wrong"}',
            "env.task.observations.wrong: in the mirrored state it is",
        ),
        ("observations.left={term: contact, geoms: [front_left_foot]}", "env.task.observations.left: its mirror image"),
        ("rewards.contact={weight: -1, geoms: [front_left_foot]}", "env.task.rewards.contact: in the mirrored state"),
    ],
)
def test_term_without_a_mirror_image_is_refused_by_its_key(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        mirror_of(task(MODELS / "quadruped.xml", f"+env.task.{words}"))
    assert str(error.value).startswith(f"ppo.symmetry: {message}")


def test_function_of_the_user_with_a_mirror_rule_is_mirrored() -> None:
    own = mirror_of(task(MODELS / "quadruped.xml", '+env.task.observations.down={term: "test_symmetry:down"}'))
    np.testing.assert_array_equal(own.observations["state"].sign[-3:], [1, -1, 1])


@pytest.mark.slow
def test_run_learns_from_mirror_images(tmp_path: Path) -> None:
    words = ["env=robot_swingup", f"env.xml={MODELS / 'cart_pole.xml'}", "ppo=default", "total_steps=128", *SIZES]
    words += ["ppo.symmetry=auto", "eval.num_evals=0", f"hydra.run.dir={tmp_path}"]
    assert typed(main, *words) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (SMALLEST, "ppo.symmetry: needs env=robot"),
        (["env=robot", f"env.xml={MODELS / 'quadruped.xml'}", "+env.task.rewards.contact={weight: 1, geoms: "
          "[rear_left_foot]}"], "ppo.symmetry: env.task.rewards.contact: in the mirrored state"),
    ],
)  # fmt: skip
def test_symmetry_that_cannot_be_used_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed(main, *words, "ppo.symmetry=auto", f"hydra.run.dir={tmp_path / 'run'}") == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"rlstable: {message}")
