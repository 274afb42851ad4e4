"""Faults injected into Brax's own PPO: their place and time, without other changes."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass

from scripts.rivals import brax_rival

ENVS, STEPS, EPISODE = 8, 60, 10
BAD = 1e30

pytestmark = pytest.mark.usefixtures("quick_compile")


def rollout(seed: int = 0, **fault: Any) -> tuple[Any, Any]:
    """First states, and every state of a rollout under Brax's training wrappers, with the actions all 0."""
    from brax.envs.wrappers.training import wrap

    env = wrap(brax_rival.FaultyBraxEnv(PointMass(), brax_rival.Fault(**fault), seed), episode_length=EPISODE)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = env.step(state, jnp.zeros((ENVS, 2)))
        return state, state

    first = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(seed), ENVS))
    return jax.device_get((first, jax.jit(lambda first: jax.lax.scan(step, first, length=STEPS)[1])(first)))


def hits(states: Any) -> dict[str, np.ndarray]:
    """Positions of the bad number, by site: arrays [STEPS, ENVS]."""
    return {
        "physics": states.pipeline_state.q[..., 0] == np.float32(BAD),
        "observation": states.obs[..., 0] == np.float32(BAD),
        "reward": states.reward == np.float32(BAD),
        "done": states.done == np.float32(BAD),
        "metrics": states.metrics[min(states.metrics)] == np.float32(BAD),
        "info": states.info["fault_probe"] == np.float32(BAD),
    }


@pytest.mark.parametrize("site", ["observation", "reward", "metrics", "info", "done"])
def test_bad_number_is_only_at_its_site(site: str) -> None:
    _, states = rollout(site=site, value=BAD, probability=0.1)
    found = hits(states)
    assert 0.03 < found.pop(site).mean() < 0.2
    assert not any(where.any() for where in found.values())


def test_fault_keeps_its_window_over_automatic_resets() -> None:
    _, states = rollout(site="reward", value=BAD, probability=1.0, first_step=15, last_step=34)
    when = hits(states)["reward"]
    assert when[15:35].all() and when.sum() == 20 * ENVS
    np.testing.assert_array_equal(states.info["fault"]["count"][:, 0], np.arange(1, STEPS + 1))
    assert (states.info["steps"].max(axis=0) == EPISODE).all()


def test_bad_physics_is_seen_in_the_observation_and_site_all_hits_all_environments() -> None:
    _, states = rollout(site="all", value=BAD, probability=0.05)
    found = hits(states)
    np.testing.assert_array_equal(found["physics"], found["observation"])
    steps = found["physics"].all(axis=1)
    np.testing.assert_array_equal(steps, found["physics"].any(axis=1))
    assert steps.any() and not steps.all()


def test_reset_fault_makes_a_share_of_resets_bad() -> None:
    first, _ = rollout(site="reset", value=math.nan, probability=0.5)
    assert 0 < np.isnan(first.obs[:, 0]).sum() < ENVS
    healthy, states = rollout()
    assert np.isfinite(healthy.obs).all() and np.isfinite(states.obs).all()
