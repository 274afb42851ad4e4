"""Tasks of rlstable as Gymnasium environments: Gymnasium's own checks, automatic resets, seeds and bad simulations."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gymnasium = pytest.importorskip("gymnasium")

from browser import needs_opengl  # noqa: E402
from commands import ROOT  # noqa: E402
from short_runs import trained  # noqa: E402
from toys import PointMass  # noqa: E402

import rlstable  # noqa: E402
from rlstable.config import ConfigError  # noqa: E402
from rlstable.policy.saved_run import open_run  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def push(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.uniform(-1.0, 1.0, shape).astype(np.float32)


# --- one environment


def test_threads_take_turns_in_one_environment() -> None:
    env = rlstable.gym_env(PointMass(bound=1e6), overrides=["env.episode_length=1000"])
    env.reset(seed=0)
    with ThreadPoolExecutor(4) as pool:
        steps = [pool.submit(env.step, np.full(2, 0.1, np.float32)) for _ in range(40)]
    alone = rlstable.gym_env(PointMass(bound=1e6), overrides=["env.episode_length=1000"])
    alone.reset(seed=0)
    seen = [alone.step(np.full(2, 0.1, np.float32))[0] for _ in range(40)]
    assert {tuple(step.result()[0]) for step in steps} == {tuple(observation) for observation in seen}


def test_gymnasium_finds_no_mistake_in_a_single_environment() -> None:
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*Box observation space (min|max)imum value is -?infinity")
        warnings.filterwarnings("ignore", message=".*not recommended|.*spec")
        check_env(rlstable.gym_env(PointMass(), overrides=["env.episode_length=6"]), skip_render_check=True)


def test_spaces_have_the_shapes_and_types_of_the_environment() -> None:
    env = rlstable.gym_env(PointMass(named=True))
    assert env.action_space == gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    parts = {name: (space.shape, space.dtype) for name, space in env.observation_space.items()}
    assert parts == {"state": ((4,), np.float32), "privileged_state": ((5,), np.float32)}
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space


def test_episode_is_truncated_at_its_length_and_terminated_at_its_end() -> None:
    env = rlstable.gym_env("toys:PointMass", overrides=["env.episode_length=6", "env.action_repeat=2"])
    env.reset(seed=0)
    assert [env.step(np.zeros(2))[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    env = rlstable.gym_env(PointMass(bound=0.3))
    env.reset(seed=0)
    steps = (env.step(np.ones(2)) for _ in range(50))
    _, reward, terminated, truncated, info = next(step for step in steps if step[2] or step[3])
    assert terminated and not truncated
    assert type(reward) is float and reward == pytest.approx(1.0 - info["distance"])


def test_seed_repeats_all_later_episodes() -> None:
    env = rlstable.gym_env(PointMass())
    first = [env.reset(seed=3)[0], *(env.reset()[0] for _ in range(2))]
    again = [env.reset(seed=3)[0], *(env.reset()[0] for _ in range(2))]
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(first, axis=0)) == 3
    assert not np.array_equal(env.reset(seed=4)[0], first[0])


# --- a vector of environments


@pytest.fixture(scope="module")
def vector() -> Any:
    return rlstable.gym_env(PointMass(bound=0.8), num_envs=3, overrides=["env.episode_length=6"])


def test_vector_environment_has_batched_spaces_and_says_how_it_resets(vector: Any) -> None:
    assert isinstance(vector, gymnasium.vector.VectorEnv)
    assert vector.metadata["autoreset_mode"] == gymnasium.vector.AutoresetMode.SAME_STEP
    assert vector.single_observation_space.shape == (4,) and vector.observation_space.shape == (3, 4)
    assert vector.action_space.shape == (3, 2)
    observations, infos = vector.reset(seed=0)
    assert observations in vector.observation_space
    assert infos["_distance"].tolist() == [True] * 3


def test_every_environment_of_a_vector_plays_the_episodes_of_a_single_environment(vector: Any) -> None:
    """Observations, rewards, ends, last observations and metrics over several episodes, and the format of Gymnasium."""
    singles = [rlstable.gym_env(PointMass(bound=0.8), overrides=["env.episode_length=6"]) for _ in range(3)]
    reference = gymnasium.vector.SyncVectorEnv(
        [lambda env=env: env for env in singles], autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    np.testing.assert_allclose(vector.reset(seed=7)[0], reference.reset(seed=7)[0], rtol=1e-6)
    rng, ends = np.random.default_rng(0), np.zeros(2, int)
    for _ in range(20):
        action = push(rng, (3, 2))
        own, other = vector.step(action), reference.step(action)
        for mine, theirs in zip(own[:4], other[:4], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
            assert mine.dtype == theirs.dtype
        ends += own[2].sum(), own[3].sum()
        if (finished := own[2] | own[3]).any():
            for infos in (own[4], other[4]):
                assert infos["_final_obs"].tolist() == infos["_final_info"].tolist() == finished.tolist()
            for mine, theirs in zip(own[4]["final_obs"], other[4]["final_obs"], strict=True):
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
            final, expected = own[4]["final_info"], other[4]["final_info"]
            assert final.keys() == expected.keys()
            np.testing.assert_allclose(final["distance"], expected["distance"], rtol=1e-5)
        else:
            assert "final_obs" not in own[4] and "final_obs" not in other[4]
    assert (ends > 0).all()  # terminations and truncations


def test_list_of_seeds_sets_each_environment(vector: Any) -> None:
    together, _ = vector.reset(seed=5)
    listed, _ = vector.reset(seed=[7, 6, 5])
    np.testing.assert_array_equal(listed, together[::-1])
    with pytest.raises(ValueError, match="2 seeds for 3 environments"):
        vector.reset(seed=[1, 2])


def test_caller_may_change_the_returned_arrays(vector: Any) -> None:
    observations, _ = vector.reset(seed=0)
    before = observations.copy()
    observations[:] = 100.0
    vector.step(np.zeros((3, 2)))
    np.testing.assert_array_equal(vector.reset(seed=0)[0], before)


def test_bad_simulation_terminates_the_episode_with_the_last_good_observation() -> None:
    env = rlstable.gym_env(PointMass(fault="physics", probability=0.3), num_envs=4)
    before, _ = env.reset(seed=0)
    found = 0
    for _ in range(20):
        observations, rewards, terminated, _, infos = env.step(np.zeros((4, 2)))
        assert np.isfinite(observations).all() and np.isfinite(rewards).all()
        bad = infos["quarantined"]
        assert terminated[bad].all() and (rewards[bad] == 0).all()
        for index in np.flatnonzero(bad):
            np.testing.assert_array_equal(infos["final_obs"][index], before[index])
        found, before = found + bad.sum(), observations
    assert found > 3


def test_dictionary_observations_and_history_are_vectorised() -> None:
    env = rlstable.gym_env(PointMass(named=True), num_envs=2, overrides=["env.history=3", "env.episode_length=2"])
    env.reset(seed=0)
    env.step(np.ones((2, 2)))
    observations, _, _, truncated, infos = env.step(np.ones((2, 2)))
    assert truncated.all() and observations in env.observation_space
    last = infos["final_obs"][1]["state"].reshape(3, 4)
    assert len(np.unique(last, axis=0)) == 3
    assert len(np.unique(observations["state"][1].reshape(3, 4), axis=0)) == 1


# --- policies and models


def test_policy_acts_in_single_and_vector_environments_with_float64_observations(tmp_path: Path) -> None:
    run_dir = trained(tmp_path).run_dir
    policy = rlstable.load_policy(run_dir)
    env = rlstable.gym_env(open_run(run_dir).config)
    observation, _ = env.reset(seed=0)
    for _ in range(12):
        action = np.asarray(policy.act(observation.astype(np.float64)))
        np.testing.assert_array_equal(action, policy.act(observation))
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            observation, _ = env.reset()
    envs = rlstable.gym_env(open_run(run_dir).config, num_envs=3)
    observations, _ = envs.reset(seed=0)
    for _ in range(3):
        observations, *_ = envs.step(np.asarray(policy.act(observations)))
    assert observations in envs.observation_space


DRAW = """
import jax
import numpy as np

import rlstable

with jax.default_matmul_precision("highest"):
    env = rlstable.gym_env("ball:Stick", overrides=["env.backend=native"], render_mode="rgb_array")
env.reset(seed=0)
assert env.unwrapped.model.nu == env.action_space.shape[0]
before = env.render()
for _ in range(10):
    env.step(np.ones(env.action_space.shape))
after = env.render()
assert before.shape == after.shape == (480, 480, 3) and before.dtype == np.uint8
assert before.std() > 1 and (before != after).any()
assert env.metadata["render_modes"] == ["rgb_array"] and env.metadata["render_fps"] > 0
env.close()
"""


@needs_opengl
def test_native_physics_is_stepped_and_drawn() -> None:
    # MuJoCo chooses its OpenGL when it is imported.
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests"))
    env = {**os.environ, "MUJOCO_GL": "osmesa", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", DRAW], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- bad input


def test_wrong_arguments_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^render_mode: toys:PointMass has no MuJoCo model to draw; leave"):
        rlstable.gym_env("toys:PointMass", render_mode="rgb_array")
    with pytest.raises(ConfigError, match=r"^render_mode: 'human' is not available; choose 'rgb_array' or None"):
        rlstable.gym_env("toys:PointMass", render_mode="human")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^num_envs: 0 must be a whole number above 0"):
        rlstable.gym_env("toys:PointMass", num_envs=0)
    with pytest.raises(ConfigError, match=r"^env\.history"):
        rlstable.gym_env("toys:PointMass", overrides=["env.history=0"])


def test_action_of_another_shape_and_a_step_before_reset_are_one_line() -> None:
    env = rlstable.gym_env(PointMass())
    with pytest.raises(RuntimeError, match="call reset first"):
        env.step(np.zeros(2))
    env.reset()
    with pytest.raises(ValueError, match=r"the action has the shape \(3,\), this environment takes \(2,\)"):
        env.step(np.zeros(3))


def test_missing_gymnasium_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^gym_env: gymnasium is not installed; pip install .*\[gymnasium\]"):
        rlstable.gym_env("toys:PointMass")
