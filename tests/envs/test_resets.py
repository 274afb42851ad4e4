"""First states: clean, as many as requested, equal for equal keys, or an error that names the bad field."""

from __future__ import annotations

import functools
from typing import Any

import faulty
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.guards.env import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")

GUARDS = env_guards(GuardsConfig())
BATCH = 16


class Sometimes(faulty.Faulty):
    """First states of which a share is bad somewhere; counts how often a step is traced."""

    def __init__(self, share: float, where: str = "obs", value: float = float("nan")):
        super().__init__()
        self.share, self.where, self.value = share, where, value
        self.steps = 0

    def reset(self, rng: jax.Array) -> Any:
        state = super().reset(rng)
        bad = jax.random.uniform(jax.random.fold_in(rng, 1)) < self.share

        def spoil(x: jax.Array) -> jax.Array:
            return jnp.where(bad, self.value, x)

        if self.where == "info":
            return state.replace(info=state.info | {"sum": spoil(state.info["sum"])})
        return state.replace(**{self.where: spoil(getattr(state, self.where))})

    def step(self, state: Any, action: jax.Array) -> Any:
        self.steps += 1
        return super().step(state, action)


@functools.cache
def resets(share: float = 0.3, where: str = "obs", value: float = float("nan"), guarded: bool = True) -> Resets:
    return Resets(VectorEnv(Sometimes(share, where, value), 8, 1, GUARDS if guarded else {}), BATCH)


def bad_rows(states: Any) -> np.ndarray:
    return ~np.isfinite(states.obs).all(axis=1)


def test_resets_without_a_guard_keep_bad_first_states():
    """Nearly a third of the first states is bad here."""
    states = resets(guarded=False).draw(jax.random.PRNGKey(0), 100)
    assert 15 < bad_rows(states).sum() < 50


@pytest.mark.parametrize("count", [7, 50])
def test_resets_return_the_requested_number_of_clean_states(count):
    """Less than a batch, and several batches."""
    states = resets().draw(jax.random.PRNGKey(0), count)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(states)} == {count}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(states)), "they are on the host"
    for leaf in jax.tree.leaves(states):
        assert np.isfinite(leaf).all()
    assert len(np.unique(states.info["ident"])) == count, "a state was drawn twice"


def test_first_states_depend_on_the_key_alone():
    """Same key, same states, also the first of a longer draw; another key, others."""
    draw = resets().draw
    one, again, longer = (draw(jax.random.PRNGKey(3), n) for n in (20, 20, 45))
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (one, again, longer)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c[:20])
    assert not np.isin(draw(jax.random.PRNGKey(4), 20).info["ident"], one.info["ident"]).any()


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("obs", float("nan"), r"obs\[0\] is not finite"),
        ("info", float("nan"), "another part of its state is not finite, or beyond guards.quarantine.max_other_norm"),
        ("obs", 1e30, r"obs\[0\] is 1e\+30 to 1e\+30, beyond guards.quarantine.max_abs_observation=1e\+12"),
    ],
)
def test_environment_without_a_clean_reset_is_rejected(where, value, complaint):
    """By name, in one line, before a step is compiled."""
    hopeless = resets(1.0, where, value)
    with pytest.raises(ConfigError, match=complaint) as refused:
        hopeless.draw(jax.random.PRNGKey(0), 4)
    assert str(refused.value).startswith("env.name: ") and "\n" not in str(refused.value)
    assert "guards.quarantine" in str(refused.value)
    assert hopeless._env.env.steps == 0
