"""Forms of conditional work that need no answer of the host: on a CPU they compute what the CPU's own forms compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from toys import mesh, tiny_config

from rlstable.device import sharding, transforms
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.setup import TrainingSetup

pytestmark = pytest.mark.usefixtures("quick_compile")

ITERATIONS, UPDATES = 3, 4  # two minibatches in each of two epochs
# Bad physics, so that environments are quarantined and recorded, and a limit that SGD oversteps.
BAD = {"kwargs": {"fault": "physics", "probability": 0.05}}
STRICT = {"guards": {"limiters": {"kl": 1e-3}}, "supervise": {}}


def train(env: dict[str, Any], epochs: int | None) -> tuple[TrainState, list[Metrics]]:
    """A few iterations from the same first state; `epochs` replaces the number of epochs."""
    config = tiny_config(env={**BAD, **env, "reset_pool_size": 8}, **STRICT)
    setup, key = TrainingSetup(config, mesh()), jax.random.PRNGKey(0)
    state = setup.first_state(key, key, config.fault)
    if epochs is not None:
        replaced = jax.device_put(np.full_like(state.tuning.epochs, epochs), state.tuning.epochs.sharding)
        state = dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, epochs=replaced))
    program = setup.compiled(state)
    metrics = []
    for _ in range(ITERATIONS):
        state, reported = program(state)
        metrics.append(jax.tree.map(np.array, sharding.fetch(reported)))
    return state, metrics


def arrays(tree: Any) -> list[np.ndarray]:
    return [
        np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(tree)
    ]


@pytest.mark.parametrize(
    ("reset", "epochs"),
    [
        pytest.param("cached", None, marks=pytest.mark.slow),
        ("pool", None),
        pytest.param("cached", 0, marks=pytest.mark.slow),
    ],
    ids=["cached", "pool", "only collecting"],
)
def test_forms_of_an_accelerator_train_like_the_forms_of_a_cpu(
    reset: str, epochs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, metrics = train({"reset": reset}, epochs)
    monkeypatch.setattr(transforms, "_host_reads_predicates", lambda: True)
    static_state, static_metrics = train({"reset": reset}, epochs)
    for expected, found in zip(arrays((state, metrics)), arrays((static_state, static_metrics)), strict=True):
        np.testing.assert_array_equal(found, expected)
    # The run has used all forms: drawn first states, a recorded incident and epochs that were undone.
    assert int(metrics[-1].counters.trips["quarantine"].lo.sum()) > 0
    assert state.incident is not None and bool(state.incident.taken[0])
    updates = int(metrics[-1].counters.updates)
    assert updates == 0 if epochs == 0 else updates < ITERATIONS * UPDATES
