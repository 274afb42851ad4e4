"""Forms of conditional work that need no answer of the host: on a CPU they compute what the CPU's own forms compute."""

from __future__ import annotations

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


def train(env: dict[str, Any]) -> tuple[TrainState, list[Metrics]]:
    """A few iterations from the same first state."""
    config = tiny_config(env={**BAD, **env, "reset_pool_size": 8}, **STRICT)
    setup, key = TrainingSetup(config, mesh()), jax.random.PRNGKey(0)
    state = setup.first_state(key, key, config.fault)
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


@pytest.mark.parametrize("reset", [pytest.param("cached", marks=pytest.mark.slow), "pool"])
def test_forms_of_an_accelerator_train_like_the_forms_of_a_cpu(reset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state, metrics = train({"reset": reset})
    monkeypatch.setattr(transforms, "_host_reads_predicates", lambda: True)
    static_state, static_metrics = train({"reset": reset})
    for expected, found in zip(arrays((state, metrics)), arrays((static_state, static_metrics)), strict=True):
        np.testing.assert_array_equal(found, expected)
    # The run has used all forms: drawn first states, a recorded incident and epochs that were undone.
    assert int(metrics[-1].counters.trips["quarantine"].lo.sum()) > 0
    assert state.incident is not None and bool(state.incident.taken[0])
    assert int(metrics[-1].counters.updates) < ITERATIONS * UPDATES
