"""Generalized advantage estimation: equality with Brax, and of its two forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.training.agents.ppo.losses import compute_gae

from rlstable.ppo import gae
from rlstable.ppo.gae import estimate

pytestmark = pytest.mark.usefixtures("quick_compile")
B = 3


@jax.jit
def ours(rewards, values, bootstrap_value, truncation, termination, discount, lambda_):
    return estimate(
        rewards=rewards, values=values, bootstrap_value=bootstrap_value, truncation=truncation,
        termination=termination, discount=discount, lambda_=lambda_,
    )  # fmt: skip


@jax.jit
def brax(rewards, values, bootstrap_value, truncation, termination, discount, lambda_):
    return compute_gae(truncation, termination, rewards, values, bootstrap_value, lambda_, discount)


def test_gae_equals_brax():
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, 50, B)).astype(np.float32)
    end = rng.choice(3, p=(0.8, 0.1, 0.1), size=(50, B))
    last = rng.normal(size=B).astype(np.float32)
    both = rewards, values, last, jnp.float32(end == 1), jnp.float32(end == 2), 0.97, 0.95
    for mine, theirs in zip(ours(*both), brax(*both), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 257])
def test_associative_gae_equals_the_loop(length):
    """Accelerators compute GAE without a loop."""
    rng = np.random.default_rng(length)
    deltas = jnp.asarray(rng.normal(size=(length, 7)), jnp.float32)
    weights = jnp.asarray(rng.uniform(0, 1, (length, 7)) * (rng.random((length, 7)) > 0.1), jnp.float32)
    expected, exact = gae._by_loop(deltas, weights), np.zeros((length + 1, 7))
    for t in reversed(range(length)):
        exact[t] = np.float64(deltas[t]) + np.float64(weights[t]) * exact[t + 1]
    found = jax.jit(gae._by_prefix_sums)(deltas, weights)
    for values in (expected, found):
        np.testing.assert_allclose(values, exact[:-1], rtol=2e-6, atol=2e-6)
    assert "scan" not in str(jax.make_jaxpr(gae._by_prefix_sums)(deltas, weights))
