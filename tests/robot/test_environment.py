"""A robot's environment: rewards by term, delay, filter, history, noise, commands, pushes and endings."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moments import config, environment

from rlstable.envs.interface import check
from rlstable.envs.load import load
from rlstable.robot import commands
from rlstable.robot.actions import controls
from rlstable.robot.environment import PAST

pytestmark = pytest.mark.usefixtures("quick_compile")


@functools.cache
def programs(task: str, model: str, *words: str) -> tuple[Any, Any, Any]:
    """An environment on C MuJoCo, and its compiled reset and step."""
    env = load(config(task, model, "env.backend=native", *words).env).env
    return env, jax.jit(env.reset), jax.jit(env.step)


def played(task: str, model: str, *words: str, actions: Any, seed: int = 0) -> list[Any]:
    """The states of an episode with these actions, the first state included."""
    env, reset, step = programs(task, model, *words)
    states = [reset(jax.random.PRNGKey(seed))]
    for action in actions:
        states.append(step(states[-1], jnp.full(env.action_size, action, jnp.float32)))
    return states


def test_reward_is_the_sum_of_its_terms_which_are_metrics() -> None:
    state = played("robot_swingup", "cart_pole", actions=[1.0])[1]
    parts = {name: float(x) for name, x in state.metrics.items() if name.startswith("reward/")}
    assert parts.keys() == {"reward/raised", "reward/joint_speed", "reward/action_rate"}
    assert float(state.reward) == pytest.approx(sum(parts.values()), abs=1e-7)
    assert parts["reward/action_rate"] == pytest.approx(-0.05 * 1.0 * 0.02)  # weight, change, seconds per step


def test_action_moves_the_control_from_home_by_its_share_of_the_range() -> None:
    state = played("robot", "quadruped", actions=[0.5])[1]
    assert state.data.ctrl[0] == pytest.approx(0.0 + 0.5 * 0.5 * 0.8)
    assert state.data.ctrl[2] == pytest.approx(-1.6 + 0.5 * 0.5 * 1.0)


def test_control_stays_within_the_actuators_limits() -> None:
    word = "env.task.actions.scale.position=10"
    state = played("robot", "quadruped", word, actions=[1.0])[1]
    np.testing.assert_allclose(state.data.ctrl[:3], [0.8, 2.6, -0.7], rtol=1e-6)


def test_delayed_action_reaches_the_actuator_later() -> None:
    states = played("robot_swingup", "cart_pole", "env.task.actions.delay=[2, 2]", actions=[1.0, 0.5, 0.0, 0.0])
    assert [float(state.data.ctrl[0]) for state in states] == [0.0, 0.0, 0.0, 1.0, 0.5]


def test_delay_is_drawn_from_its_range_for_each_episode() -> None:
    _, reset, _ = programs("robot_swingup", "cart_pole", "env.task.actions.delay=[1, 3]")
    drawn = {int(reset(jax.random.PRNGKey(seed)).info[PAST].delay) for seed in range(20)}
    assert drawn == {1, 2, 3}


def test_filter_keeps_its_share_of_the_old_control() -> None:
    states = played("robot_swingup", "cart_pole", "env.task.actions.filter=0.75", actions=[1.0, 1.0])
    assert [float(state.data.ctrl[0]) for state in states] == [0.0, 0.25, 0.4375]


def test_history_shows_the_newest_steps_first_and_starts_full() -> None:
    words = (
        "env.task.observations.joint_positions=null", "env.task.observations.joint_directions=null",
        "+env.task.observations.joint_velocities.history=3", "+env.task.observations.joint_velocities.scale=0.1",
    )  # fmt: skip
    states = played("robot_swingup", "cart_pole", *words, actions=[1.0, 1.0])
    speeds = [0.1 * np.asarray(state.data.qvel) for state in states]
    np.testing.assert_allclose(states[0].obs, np.concatenate([speeds[0]] * 3), rtol=1e-6)
    np.testing.assert_allclose(states[2].obs, np.concatenate(speeds[::-1]), rtol=1e-6)


def test_delayed_observation_shows_an_older_step() -> None:
    words = (
        "env.task.observations.joint_positions=null", "env.task.observations.joint_directions=null",
        "+env.task.observations.joint_velocities.delay=[1, 1]",
    )  # fmt: skip
    states = played("robot_swingup", "cart_pole", *words, actions=[1.0, 1.0])
    np.testing.assert_allclose(states[2].obs, states[1].data.qvel, rtol=1e-6)


def test_noise_is_within_its_bound_and_differs_from_step_to_step() -> None:
    words = (
        "env.task.observations.joint_velocities=null", "env.task.observations.joint_directions=null",
        "+env.task.observations.joint_positions.noise=0.01",
    )  # fmt: skip
    states = played("robot_swingup", "cart_pole", *words, actions=[0.0, 0.0, 0.0])
    noise = [float(state.obs[0] - state.data.qpos[0]) for state in states]
    assert all(0 < abs(x) <= 0.01 for x in noise) and len(set(noise)) == len(noise)


def test_critic_sees_the_policys_observations_without_noise_and_delay_and_its_own() -> None:
    words = (
        "+env.task.critic_observations.height={}",
        "+env.task.observations.joint_velocities={noise: 0.1, delay: [1, 1]}",
    )  # fmt: skip
    states = played("robot_swingup", "cart_pole", *words, actions=[1.0, 1.0])
    critic = np.array([state.obs["privileged_state"] for state in states])
    assert (states[0].obs["state"].shape, critic.shape) == ((5,), (3, 6))
    names = programs("robot_swingup", "cart_pole", *words)[0].unwrapped.names_of_policy
    assert (names["actions"], names["privileged_state"]) == (["push"], [*names["state"], "height"])
    keys = [config("robot_swingup", "cart_pole", *own).network.value_obs_key for own in (words, ())]
    assert keys == ["privileged_state", "state"]
    np.testing.assert_allclose(critic[:, 1:3], [state.data.qvel for state in states], atol=1e-6)
    assert all(abs(float(states[-1].obs["state"][i]) - critic[-1, i]) > 1e-3 for i in (1, 2))


RANGES = "forward: [0.5, 1.0], sideways: [-0.1, 0.1], turn: [0, 0], stand: 0, resample: 0.04"
EACH_STEP = "+env.task.commands.velocity={forward: [0, 1], sideways: [0, 0], turn: [0, 0], stand: 0, resample: 0.02}"
COMMAND = f"+env.task.commands.velocity={{{RANGES}}}"


def test_command_is_drawn_within_its_ranges_and_again_when_due() -> None:
    states = played("robot", "hopper", COMMAND, actions=[0.0] * 4)
    drawn = np.array([state.info[PAST].command["velocity"] for state in states])
    assert ((drawn >= [0.5, -0.1, 0]) & (drawn <= [1.0, 0.1, 0])).all()
    changed = (np.abs(np.diff(drawn, axis=0)).sum(axis=1) > 0).tolist()
    assert changed == [False, True, False, True]  # every second step of 0.02 s
    np.testing.assert_allclose(states[2].obs[-3:], drawn[2])  # the policy sees the command that it must follow next


def test_commands_fill_their_ranges_and_a_share_of_them_is_to_stand() -> None:
    robot = programs("robot_velocity", "quadruped")[0].unwrapped.robot
    ranges = {"forward": (-0.5, 1.0), "sideways": (-0.3, 0.3), "turn": (-0.7, 0.7)}
    keys = jax.random.split(jax.random.PRNGKey(0), 4000)
    drawn = np.asarray(jax.vmap(lambda key: commands.velocity(robot, key, **ranges))(keys))
    stands = (drawn == 0).all(axis=1)
    assert 0.08 < stands.mean() < 0.12
    np.testing.assert_allclose(drawn.min(axis=0), [-0.5, -0.3, -0.7], atol=0.01)
    np.testing.assert_allclose(drawn.max(axis=0), [1.0, 0.3, 0.7], atol=0.01)
    assert np.abs(np.corrcoef(drawn[~stands].T) - np.eye(3)).max() < 0.06


def test_push_changes_the_speed_of_the_root_when_due() -> None:
    states = played("robot", "quadruped", "env.task.pushes={every: 0.04, speed: 5.0}", actions=[0.0] * 3)
    speeds = [float(jnp.linalg.norm(state.data.qvel[:2])) for state in states]
    assert max(speeds[:3]) < 0.5 and 3.0 < speeds[3] < 6.0


def test_direction_of_a_push_does_not_follow_from_the_command_of_the_same_step() -> None:
    env, reset, step = programs("robot", "quadruped", "env.task.pushes={every: 0.02, speed: 5.0}", EACH_STEP)
    found = []
    for seed in range(8):
        state = step(reset(jax.random.PRNGKey(seed)), jnp.zeros(env.action_size))
        after = step(state, jnp.zeros(env.action_size))
        push = after.data.qvel[:2] - state.data.qvel[:2]
        angle = float(jnp.arctan2(push[1], push[0]) / (2 * jnp.pi)) % 1.0
        found.append((angle, float(after.info[PAST].command["velocity"][0])))
    angles, forward = np.array(found).T
    assert np.abs(angles - forward).max() > 0.2


def test_fallen_robot_ends_its_episode_and_is_no_truncation() -> None:
    env, reset, step = programs("robot", "quadruped")
    state = reset(jax.random.PRNGKey(0))
    on_its_back = state.data.replace(qpos=state.data.qpos.at[2:7].set(jnp.array([1.0, 0, 1, 0, 0])))
    ended = step(state.replace(data=on_its_back), jnp.zeros(env.action_size))
    assert float(ended.done) == 1 and float(ended.metrics["ending/fallen"]) == 1


def test_time_limit_truncates_the_episode() -> None:
    _, reset, step = programs("robot_swingup", "cart_pole", "+env.task.endings.time={seconds: 0.04}")
    state = reset(jax.random.PRNGKey(0))
    state = state.replace(info={**state.info, "truncation": jnp.zeros(())})
    ends = []
    for _ in range(2):
        state = step(state, jnp.zeros(1))
        ends.append((float(state.done), float(state.info["truncation"])))
    assert ends == [(0, 0), (1, 1)]


def test_random_reset_drops_a_free_robot_in_any_orientation_above_the_floor() -> None:
    env, reset, _ = programs("robot_getup", "quadruped")
    states = [reset(jax.random.PRNGKey(seed)) for seed in range(12)]
    upright = [float(env.robot.rotation(state.data)[2, 2]) for state in states]
    assert min(upright) < -0.3 and max(upright) > 0.3
    for state in states:
        assert float(env.robot.height(state.data)) >= env.robot.radius
        np.testing.assert_allclose(jnp.linalg.norm(state.data.qpos[3:7]), 1.0, rtol=1e-5)


def test_robot_that_gets_up_moves_its_joints_over_their_whole_ranges_in_slow_steps() -> None:
    env = programs("robot_getup", "quadruped")[0]
    assert (env.dt, env.n_substeps) == (pytest.approx(0.06), 15)
    low, high = (controls(env.robot, side * jnp.ones(12), env.task.actions)[:3] for side in (-1, 1))
    np.testing.assert_allclose(low, [-0.8, -1.0, -2.6], rtol=1e-6)
    np.testing.assert_allclose(high, [0.8, 2.6, -0.7], rtol=1e-6)


def test_home_reset_is_home_within_its_noise() -> None:
    env, reset, _ = programs("robot", "quadruped")
    qpos = np.asarray(reset(jax.random.PRNGKey(3)).data.qpos)
    apart = np.abs(qpos - env.robot.home)
    assert apart[:7].max() < 1e-6 and 0 < apart[7:].max() <= 0.1 + 1e-6


def test_course_asks_for_the_same_velocities_in_every_episode_and_leaves_training_as_it_is() -> None:
    env = programs("robot_velocity", "quadruped")[0]
    low, high = env.velocities
    course = env.on_course()
    step, asked = jax.jit(course.step), []
    for seed, steps in ((0, 0), (1, 99), (2, 199), (3, 299), (4, 399), (5, 499)):
        state = course.reset(jax.random.PRNGKey(seed))
        past = state.info[PAST].replace(steps=jnp.float32(steps))
        state = step(state.replace(info={**state.info, PAST: past}), jnp.zeros(env.action_size))
        command, moved = course.motion(state)
        np.testing.assert_array_equal(command, state.obs["state"][-3:])  # as the policy sees it
        assert moved.shape == (3,)
        asked.append(command)
    forward, sideways, turn = np.diag(0.8 * high)
    expected = [np.zeros(3), forward, turn, sideways, np.diag(0.8 * low)[0], np.zeros(3)]  # and again from the start
    np.testing.assert_allclose(asked, expected, rtol=1e-6)
    assert env.course is None and course is not env
    assert float(jnp.abs(env.reset(jax.random.PRNGKey(0)).info[PAST].command["velocity"]).max()) > 0


def test_training_can_use_every_ready_task() -> None:
    for task, model in (("robot_stand", "hopper"), ("robot_reach", "arm")):
        check(programs(task, model)[0], task)


def test_environment_on_the_host_has_no_model_of_mjx() -> None:
    assert environment("robot", "hopper").mjx_model is None
