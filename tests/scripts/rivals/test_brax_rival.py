"""Faults injected into Brax's own PPO: their time and their resets, under Brax's wrappers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass

from rlstable.config.faults import FaultConfig
from scripts.rivals import brax_rival

ENVS, STEPS, EPISODE = 8, 60, 10

pytestmark = pytest.mark.usefixtures("quick_compile")


def rollout(steps: int = 1, **fault: Any) -> tuple[Any, Any]:
    """First states, and every state of a rollout under Brax's training wrappers, with the actions all 0."""
    from brax.envs.wrappers.training import wrap

    env = wrap(brax_rival.FaultyBraxEnv(PointMass(), FaultConfig(**fault), steps), episode_length=EPISODE)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = env.step(state, jnp.zeros((ENVS, 2)))
        return state, state

    first = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), ENVS))
    return jax.device_get((first, jax.jit(lambda first: jax.lax.scan(step, first, length=STEPS)[1])(first)))


def test_fault_keeps_its_window_over_automatic_resets() -> None:
    _, states = rollout(5, site="reward", value=1e30, probability=1.0, start=3, iterations=4)
    when = states.reward == np.float32(1e30)
    assert when[15:35].all() and when.sum() == 20 * ENVS
    assert np.isfinite(states.obs).all() and (states.info["steps"].max(axis=0) == EPISODE).all()


def test_reset_fault_makes_a_share_of_resets_bad() -> None:
    first, states = rollout(site="reset", value=math.nan, probability=0.5)
    bad = np.isnan(first.obs[:, 0])
    assert 0 < bad.sum() < ENVS
    # Brax resets to the first state.
    np.testing.assert_array_equal(np.isnan(states.obs[EPISODE - 1, :, 0]), bad)
