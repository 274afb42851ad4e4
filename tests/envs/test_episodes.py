"""Episodes of evaluations: the program ends with the last episode, and its sums are those of a recorded episode."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass

from rlstable.envs.episodes import run_episodes, watch_episodes
from rlstable.envs.vector import VectorEnv

pytestmark = pytest.mark.usefixtures("quick_compile")
KEYS = jax.random.split(jax.random.PRNGKey(3), 6)


def pushed(obs: jax.Array, key: jax.Array) -> jax.Array:
    return obs[:, :2] + 0.5 + 0.1 * jax.random.normal(key, (len(obs), 2))


@pytest.mark.parametrize(("length", "repeat"), [(200, 1), (202, 2), (7, 1), (1, 1)])
def test_evaluated_episodes_equal_recorded_ones_whether_they_end_early_or_not(length, repeat):
    @jax.jit
    def played(bound):
        env = VectorEnv(PointMass(bound), length, repeat, {})
        recorded = watch_episodes(env, pushed, KEYS, KEYS[0], lambda state: state.reward)
        return run_episodes(env, pushed, KEYS, KEYS[0]), *recorded

    for bound in (0.5, 1e9):
        evaluated, recorded, rewards = played(bound)
        jax.tree.map(np.testing.assert_array_equal, evaluated, recorded)
        assert rewards.shape == (1 + length // repeat, len(KEYS))
        ended_early = bool((np.asarray(evaluated.length) < length).all())
        assert ended_early == (bound < 1 and length >= 200)


@pytest.mark.parametrize(("bound", "played"), [(0.5, 100), (1e9, 400)])
def test_evaluation_ends_soon_after_its_last_episode(bound, played):
    """Played actions: a part of 100 if every episode ends in it, all 400 otherwise."""
    actions = []
    env = VectorEnv(PointMass(bound=bound), 400, 1, {})

    def policy(obs: jax.Array, key: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: actions.append(1))
        return jnp.ones((len(obs), 2))

    jax.block_until_ready(jax.jit(lambda: run_episodes(env, policy, KEYS, KEYS[0]))())
    jax.effects_barrier()
    assert len(actions) == played
