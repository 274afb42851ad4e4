"""States, `info` and episode ends as users write them: what a reset restores, what a step counts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile.users import Cart, Counting, Limited, Remembering
from toys import State, step_alone

from rlstable.config.guards import GuardsConfig
from rlstable.envs.episodes import run_episodes
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.policy.evaluator import summarize
from rlstable.ppo.guards import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")

GUARDS = env_guards(GuardsConfig())
COUNT = 6
LEVEL, DONE_COUNT = "AutoResetWrapper_preserve_info", "AutoResetWrapper_done_count"
FAULTS = {"memory": 2.0, "info": 3.0, "preserved info": 4.0}


@functools.cache
def programs(vector: VectorEnv) -> tuple[Any, Any]:
    def step(state: Any, action: Any, pool: Any, guard_state: Any) -> Any:
        return step_alone(vector, state, action, pool, jax.random.PRNGKey(5), guard_state)

    return jax.jit(vector.reset), jax.jit(step)


def play(vector: VectorEnv, actions: Any) -> list[Any]:
    """Results of one step per row of actions `[T, B]`; the first states are drawn by key 0, the pool by key 1."""
    reset, step = programs(vector)
    keys = jax.random.split(jax.random.PRNGKey(0), COUNT), jax.random.split(jax.random.PRNGKey(1), COUNT)
    state, pool = map(reset, keys)
    packed = pool_of(pool) if vector.uses_pool else None
    guard_state, results = {name: guard.init() for name, guard in vector.guards.items()}, []
    for action in np.float32(actions):
        result = step(state, jnp.asarray(action)[:, None], packed, guard_state)
        state, guard_state = result.state, result.guard_state
        results.append(jax.device_get(result._replace(state=state)))
    return results


def vector_of(env: Any, guarded: bool = False, **more: Any) -> VectorEnv:
    settings = {"episode_length": 100, "action_repeat": 1, "guards": GUARDS if guarded else {}} | more
    return Hashed(env, **settings)


class Hashed(VectorEnv):
    """Is its own key in the cache of programs."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


REMEMBERING = vector_of(Remembering(), guarded=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_leaf_anywhere_in_the_state_is_quarantined_once_and_replaced_from_the_pool(fault):
    actions = np.zeros((4, COUNT))
    actions[1, 2] = FAULTS[fault]
    results = play(REMEMBERING, actions)
    bad = np.zeros((4, COUNT), bool)
    bad[1, 2] = True
    np.testing.assert_array_equal([~result.valid for result in results], bad)
    causes = GUARDS["quarantine"].causes
    assert results[-1].guard_state["quarantine"].trips.tolist() == [int(cause == "info") for cause in causes]
    after = results[1].state
    pool = programs(REMEMBERING)[0](jax.random.split(jax.random.PRNGKey(1), COUNT))
    (row,) = np.flatnonzero(pool.memory[:, 0] == after.memory[2, 0])
    assert after.pipeline_state.q[2] == pool.pipeline_state.q[row] and after.info["ticks"][2] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after) if x.dtype == np.float32)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("restores", ["cached", "restore_info", "pool"])
def test_reset_keeps_what_the_wrapper_of_playground_promises_to_keep(guarded, restores):
    """`AutoResetWrapper_preserve_info`, and the count of finished episodes, whatever else a reset restores."""
    more = {"reset_from_pool": restores == "pool", "restore_info": restores == "restore_info"}
    actions = np.zeros((5, COUNT))
    actions[[1, 3], 2] = 1.0
    states = [result.state for result in play(vector_of(Remembering(), guarded, **more), actions)]
    for state, steps in zip(states, range(1, 6), strict=True):
        np.testing.assert_array_equal(state.info[LEVEL]["level"], steps)
    assert states[-1].info[DONE_COUNT].tolist() == [0, 0, 2, 0, 0, 0]
    ticks = [2, 4] if restores == "cached" else [0, 0]
    assert [states[1].info["ticks"][2], states[3].info["ticks"][2]] == ticks
    if restores != "cached":
        np.testing.assert_array_equal(states[1].memory[2], states[1].pipeline_state.q[2])


def test_value_to_preserve_is_the_one_before_a_bad_step():
    actions = np.zeros((4, COUNT))
    actions[2, 1] = FAULTS["preserved info"]
    states = [result.state for result in play(REMEMBERING, actions)]
    assert [state.info[LEVEL]["level"][1] for state in states] == [1, 2, 2, 3]


@pytest.mark.parametrize(("typed", "implementation"), [(True, "threefry2x32"), (False, "rbg")])
def test_quarantined_environments_keep_their_own_random_keys(typed, implementation):
    def numbers(keys: Any) -> np.ndarray:
        return np.asarray(jax.random.key_data(keys) if typed else keys)

    with jax.default_prng_impl(implementation):
        vector = vector_of(Remembering(typed=typed), guarded=True)
        actions = np.full((1, COUNT), FAULTS["memory"])
        (result,) = play(vector, actions)
        before = programs(vector)[0](jax.random.split(jax.random.PRNGKey(0), COUNT))
    assert not result.valid.any()
    np.testing.assert_array_equal(numbers(result.state.noise), numbers(before.noise))
    np.testing.assert_array_equal(result.state.info["rng"], before.info["rng"])
    assert len(np.unique(numbers(result.state.noise), axis=0)) == COUNT


@pytest.mark.parametrize(("restores", "ends"), [(False, [4, 5, 6, 7, 8]), (True, [4, 8])])
def test_restored_info_starts_the_counter_of_the_environment_again(restores, ends):
    """As in Brax, `info` is kept by default: each later episode then has one step."""
    results = play(vector_of(Limited(limit=4), restore_info=restores), np.zeros((8, COUNT)))
    assert [step for step, result in enumerate(results, 1) if result.state.done.all()] == ends


@pytest.mark.parametrize(("truncates", "guarded"), [(False, False), (True, False), (True, True)])
def test_own_truncation_of_the_environment_is_a_truncation(truncates, guarded):
    vector = vector_of(Limited(limit=3, truncates=truncates), guarded, restore_info=True)
    states = [result.state for result in play(vector, np.zeros((7, COUNT)))]
    assert [state.done[0] for state in states] == [0, 0, 1, 0, 0, 1, 0]
    assert [state.info["truncation"][0] for state in states] == [truncates * x for x in (0, 0, 1, 0, 0, 1, 0)]


def test_truncation_of_a_step_before_is_not_one_of_the_environment():
    """The time limit of training leaves its truncation in `info`, where the environment could find it."""

    class Ends(Cart):
        def step(self, state: State, action: jax.Array) -> State:
            return super().step(state, action).replace(done=jnp.where(state.info["ticks"] == 3, 1.0, 0.0))

    states = [result.state for result in play(vector_of(Ends(), episode_length=3), np.zeros((4, COUNT)))]
    assert [(state.done[0], state.info["truncation"][0]) for state in states] == [(0, 0), (0, 0), (1, 1), (1, 0)]


def test_metrics_with_names_of_training_do_not_replace_those_of_training():
    vector = vector_of(Counting())
    totals = play(vector, np.ones((2, COUNT)))[-1].state.info["episode_metrics"].unpacked()
    first = {name: total[0] for name, total in totals.items()}
    assert first == {"one": 2, "reward": 20, "reward_std": -14, "sum_reward": 20, "length": 2}
    keys = jax.random.split(jax.random.PRNGKey(0), COUNT)
    episodes = jax.jit(lambda: run_episodes(vector, lambda obs, key: jnp.ones((COUNT, 1)), keys, keys[0]))()
    row = summarize(jax.device_get(episodes))
    assert (row["eval/episode_reward"], row["eval/episode_reward_std"]) == (20, 0)
    assert (row["eval/avg_episode_length"], row["eval/episode_one"]) == (2, 2)
