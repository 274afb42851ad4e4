"""Failures that this project was started for: each is shown without guards, and does not happen with guards.

The others: underflow in Adam (test_faults.py), wrapping step counters (test_runner.py), overflow of a float16 policy
(policy/test_policy.py), collapse at a learning rate a thousand times too high (runs/test_recovered_runs.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_faults import armed
from toys import GUARDS_OFF, PointMass, compiled, finite, learnt, placed, tiny_config

from rlstable import faults
from rlstable.config.faults import FaultConfig
from rlstable.ppo.state import Metrics, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")
NEVER = {"site": "adam", "start": 1_000}
GUARDS: dict[str, dict[str, Any]] = {"off": GUARDS_OFF, "default": {}}


def train(iterate: Any, state: TrainState, iterations: int) -> tuple[TrainState, list[Metrics]]:
    history = []
    for _ in range(iterations):
        state, metrics = iterate(state)
        history.append(metrics)
    return state, history


def column(history: list[Metrics], name: str) -> np.ndarray:
    return np.array([float(metrics.values[name]) for metrics in history])


@functools.cache
def orbit(guards: str) -> tuple[Any, TrainState]:
    """Isaac Lab's policy, a Gaussian whose standard deviations are plain parameters, with enormous rewards."""
    config = tiny_config(
        guards=GUARDS[guards], ppo={"entropy_cost": 0.0}, network={"distribution_type": "normal"}, fault=NEVER
    )
    ppo, state = armed(config, PointMass())
    fault = FaultConfig(site="reward", value=1e6, probability=0.01, start=5, iterations=20)
    state = placed(dataclasses.replace(state, fault=faults.as_data(fault)))
    return compiled(ppo).lower(state).compile(), state


def begun(state: TrainState, std: float, rate: float) -> TrainState:
    """The state with other standard deviations and another learning rate."""
    params = jax.tree.map(lambda x: x, state.params)
    params["policy"]["params"]["std_param"]["value"] = jnp.full(2, jnp.float32(std))
    tuning = dataclasses.replace(state.tuning, learning_rate=jnp.float32(rate))
    return placed(dataclasses.replace(state, params=params, tuning=tuning))


@pytest.mark.slow
def test_orbit_explodes_or_gets_nan_deviations_only_without_guards() -> None:
    iterate, state = orbit("off")
    exploded, history = train(iterate, begun(state, 0.5, 0.1), 40)
    assert column(history, "training/v_loss").max() > 2e10
    assert finite(exploded.params)
    state = begun(state, 0.05, 0.03)
    deviations = []
    for _ in range(40):
        state, _ = iterate(state)
        deviations.append(np.asarray(state.params["policy"]["params"]["std_param"]["value"]))
    assert np.isnan(deviations[-1]).all()
    assert not finite(learnt(state))

    iterate, state = orbit("default")
    for std, rate in ((0.5, 0.1), (0.05, 0.03)):
        after, history = train(iterate, begun(state, std, rate), 40)
        assert finite(learnt(after))
        assert np.nanmax(column(history, "training/v_loss")) < 1e3  # NaN if no update was accepted
        assert np.nanmin(column(history, "training/policy_dist_min_std")) >= 1e-4
        assert column(history, "training/accepted_share").mean() > 0.8
        assert (column(history, "limiters/reward_outlier/active") > 0).sum() > 5
