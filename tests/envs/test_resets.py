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

        if self.where == "physics":
            return state.replace(pipeline_state=state.pipeline_state.replace(q=spoil(state.pipeline_state.q)))
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


def test_first_states_are_consistent():
    """Observation, physics, info and cached first state of a row belong together."""
    states = resets().draw(jax.random.PRNGKey(0), 40)
    ident = states.pipeline_state.ident
    first = states.info["first_state"].unpacked()
    for found in (states.obs[:, 2], states.info["ident"], first["physics"].ident, first["obs"][:, 2]):
        np.testing.assert_array_equal(found, ident)
    for name in ("steps", "truncation", "episode_done"):
        assert not states.info[name].any()
    assert set(states.info["episode_metrics"]) == {"sum_reward", "length", "reward", "speed"}


def test_first_states_depend_on_the_key_alone():
    """Same key, same states, also the first of a longer draw; another key, others."""
    draw = resets().draw
    one, again, longer = (draw(jax.random.PRNGKey(3), n) for n in (20, 20, 45))
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (one, again, longer)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c[:20])
    assert not np.isin(draw(jax.random.PRNGKey(4), 20).info["ident"], one.info["ident"]).any()


def test_healthy_resets_are_used_in_order():
    guarded = resets(share=0.0).draw(jax.random.PRNGKey(0), 30)
    plain = resets(share=0.0, guarded=False).draw(jax.random.PRNGKey(0), 30)
    for a, b in zip(jax.tree.leaves(guarded), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("where", "value", "complaint"),
    [
        ("obs", float("nan"), "observation is not finite"),
        ("reward", float("inf"), "reward is not finite"),
        ("physics", float("nan"), "state is not finite"),
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


def test_environment_without_a_clean_reset_is_rejected_without_guards_too():
    """Without guards bad first states are kept, as in Brax, unless every first state is bad."""
    with pytest.raises(ConfigError, match=r"none of 160 resets .* observation is not finite"):
        resets(1.0, guarded=False).draw(jax.random.PRNGKey(0), 4)


def test_environment_with_hardly_a_clean_reset_is_rejected():
    """One clean state in a few hundred is too few to draw a million of them."""
    with pytest.raises(ConfigError, match=r"[1-9]\d* of \d+ resets .* observation is not finite"):
        resets(0.996).draw(jax.random.PRNGKey(1), 1_000_000)
