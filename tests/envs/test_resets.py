"""First states: clean, as many as requested, equal for equal keys, or an error that names the bad field."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from toys import PointMass

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.ppo.guards import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")
GUARDS = env_guards(GuardsConfig())


@functools.cache
def resets(share: float = 0.3, value: float = float("nan"), guarded: bool = True) -> Resets:
    """Resets in batches of 16, of which a share gives a bad observation."""
    return Resets(VectorEnv(PointMass(bad_resets=share, value=value), 8, 1, GUARDS if guarded else {}), 16)


def test_resets_without_a_guard_keep_bad_first_states():
    states = resets(guarded=False).draw(jax.random.PRNGKey(0), 100)
    assert 15 < (~np.isfinite(states.obs).all(axis=1)).sum() < 50


@pytest.mark.parametrize("count", [7, 50])
def test_resets_return_the_requested_number_of_clean_states(count):
    """Less than a batch, and several batches."""
    states = resets().draw(jax.random.PRNGKey(0), count)
    assert {leaf.shape[0] for leaf in jax.tree.leaves(states)} == {count}
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(states)), "they are on the host"
    assert np.isfinite(states.obs).all()
    assert len(np.unique(states.obs, axis=0)) == count, "a state was drawn twice"


def test_first_states_depend_on_the_key_alone():
    """Same key, same states, also the first of a longer draw; another key, others."""
    draw = resets().draw
    one, again, longer = (draw(jax.random.PRNGKey(3), n) for n in (20, 20, 45))
    for a, b, c in zip(*(jax.tree.leaves(x) for x in (one, again, longer)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c[:20])
    assert not np.isin(draw(jax.random.PRNGKey(4), 20).obs[:, 0], one.obs[:, 0]).any()


@pytest.mark.parametrize(
    ("value", "guarded", "complaint"),
    [
        (float("nan"), True, r"obs\[0\] is not finite"),
        (float("nan"), False, r"obs\[0\] is not finite"),
        (1e30, True, r"obs\[0\] is 1e\+30 to 1e\+30, beyond guards.quarantine.max_abs_observation=1e\+12"),
    ],
)
def test_environment_without_a_clean_reset_is_rejected_in_one_line_that_names_the_field(value, guarded, complaint):
    with pytest.raises(
        ConfigError, match=rf"^env\.name: none of 160 resets .*: {complaint}; .*guards\.quarantine"
    ) as bad:
        resets(1.0, value, guarded).draw(jax.random.PRNGKey(0), 4)
    assert "\n" not in str(bad.value)
