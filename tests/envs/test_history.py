"""Observation history: exact stacks over resets, in every source of environments, and in a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from short_runs import trained
from toys import GUARDS_OFF, PointMass, step_alone, tiny_config

from rlstable.envs.history import HistoryEnv, with_history
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.guards.env import Quarantine
from rlstable.policy.saved_run import open_run
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTH = 3


def played(env: Any, steps: int = 14, **options: Any) -> tuple[Any, Any, Any]:
    """Observations `[1 + steps, B, ...]`, whether an episode ended before each, and which samples are valid."""
    vector = VectorEnv(env, 5, 1, options.get("guards", {}))
    state = vector.reset(jax.random.split(jax.random.PRNGKey(0), 4))
    pool = pool_of(vector.reset(jax.random.split(jax.random.PRNGKey(1), 3))) if vector.uses_pool else None
    guard_state = {name: guard.init() for name, guard in vector.guards.items()}

    def step(pool: Any, state: Any, key: jax.Array) -> Any:
        action = jax.random.uniform(key, (4, 2), minval=-1.0)
        stepped = step_alone(vector, state, action, pool, key, guard_state)
        valid = jnp.ones(4, bool) if stepped.valid is None else stepped.valid
        return stepped.state, (stepped.state.obs, stepped.state.done > 0, valid)

    def play(pool: Any, state: Any, keys: jax.Array) -> Any:
        return jax.lax.scan(functools.partial(step, pool), state, keys)

    keys = jax.random.split(jax.random.PRNGKey(2), steps)
    _, (observations, ended, valid) = jax.jit(play)(pool, state, keys)
    every = jax.tree.map(lambda first, others: np.concatenate([first[None], others]), state.obs, observations)
    return every, np.concatenate([np.ones((1, 4), bool), ended]), np.asarray(valid)


def stacked(observations: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """The stacks that observations `[T, B, n]` must give, written as a loop."""
    stacks = np.zeros((*observations.shape[:2], LENGTH * observations.shape[2]), np.float32)
    for env in range(observations.shape[1]):
        window: list[np.ndarray] = []
        for time, observation in enumerate(observations[:, env]):
            window = [observation] * LENGTH if ended[time, env] else [*window[1:], observation]
            stacks[time, env] = np.concatenate(window)
    return stacks


def test_stack_holds_the_last_observations_and_only_the_first_after_an_automatic_reset() -> None:
    plain, ended, _ = played(PointMass())
    stacks, _, _ = played(HistoryEnv(PointMass(), LENGTH))
    assert ended[1:].any()
    np.testing.assert_array_equal(stacks, stacked(plain, ended))


def test_every_vector_of_a_dictionary_observation_is_stacked() -> None:
    plain, ended, _ = played(PointMass(named=True))
    stacks, _, _ = played(HistoryEnv(PointMass(named=True), LENGTH))
    assert {name: part.shape[-1] for name, part in stacks.items()} == {"state": 12, "privileged_state": 15}
    for name, part in plain.items():
        np.testing.assert_array_equal(stacks[name], stacked(part, ended))


def test_quarantine_replaces_the_whole_stack() -> None:
    """A bad number must not stay in the stack of the next episode."""
    faulty = PointMass(fault="observation", probability=0.2)
    stacks, _, valid = played(HistoryEnv(faulty, LENGTH), guards={"quarantine": Quarantine()})
    after = stacks[1:][~valid]
    assert len(after) > 3 and np.isfinite(stacks).all()
    np.testing.assert_array_equal(after, np.tile(after[:, :4], LENGTH))


def test_parts_that_are_no_vector_are_not_stacked() -> None:
    env = HistoryEnv(PointMass(named=True), LENGTH)
    picture = jnp.zeros((2, 2))
    stack = {"state": jnp.arange(6.0), "picture": picture}
    newest = env.newest(stack)
    np.testing.assert_array_equal(newest["state"], [4.0, 5.0])
    assert newest["picture"] is picture


def test_history_of_one_leaves_the_environment_as_it_is() -> None:
    env = PointMass()
    assert with_history(env, 1) is env


def test_policy_of_a_run_states_its_history(tmp_path: Path) -> None:
    from rlstable.export.function import policy_function

    run = open_run(trained(tmp_path, env={"name": "toys:PointMass", "history": 2}, guards=GUARDS_OFF).run_dir)
    assert run.policy.act(np.zeros(8)).shape == (2,)
    described = policy_function(run).metadata["observation"]
    assert isinstance(described, dict)
    assert (described["size"], described["history"], described["history_order"]) == (8, 2, "oldest first")


def test_environment_object_is_stacked_for_training_and_evaluation(tmp_path: Path) -> None:
    from rlstable.envs.objects import Environments

    env = PointMass()
    settings = tiny_config(
        env={"source": "object", "name": "toys:PointMass", "backend": None, "history": 2}, devices=1,
        total_steps=128, eval={"num_evals": 1, "num_envs": 4}, logging={"console": "off"},
    )  # fmt: skip
    result = TrainingLoop(settings, tmp_path, environments=Environments(env, env)).run()
    assert result.policy is not None and result.policy.act(np.zeros(8)).shape == (2,)
    assert result.metrics["eval/episode_reward"] is not None
