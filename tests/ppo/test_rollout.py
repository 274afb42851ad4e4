"""Collected experience: value estimates of the whole batch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from toys import assemble, mesh, placed, tiny_config

from rlstable.device import sharding
from rlstable.ppo.records import Collected
from rlstable.ppo.state import SPECS


def collected(**ppo: Any) -> tuple[Any, Any, Collected]:
    own, state = assemble(tiny_config(ppo=ppo))
    collect = sharding.over_devices(lambda state: own.collect(state, state.key).data, mesh(), (SPECS,), sharding.SPLIT)
    return own, state, jax.tree.map(np.asarray, collect(placed(state)))


@pytest.mark.parametrize(
    "ppo",
    [{"gae": "per_iteration"}, {"gae": "per_iteration", "gradient_accumulation": 2}, {"clipping_epsilon_value": 0.2}],
)
def test_value_estimates_are_those_of_the_network_that_collected_each_sample(ppo: dict[str, Any]) -> None:
    own, state, data = collected(**ppo)
    each = [own.networks.value(state.params, state.normalizer, step) for step in np.swapaxes(data.observation, 0, 1)]
    assert data.value is not None and np.ptp(data.value) > 0.0
    np.testing.assert_allclose(data.value, np.stack(each, axis=1), rtol=1e-5, atol=1e-6)


def test_no_value_is_estimated_while_collecting_if_no_option_needs_it() -> None:
    assert collected()[2].value is None
