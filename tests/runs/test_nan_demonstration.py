"""One NaN in a thousand steps ruins a training without guards, and costs nothing with guards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running import train
from saved import checkpoint, events
from toys import GUARDS_OFF

from rlstable.runner.seeds import Result

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
HEALTHY = {"fault": None}
ONE_IN_A_THOUSAND = {"fault": "physics", "probability": 1e-3}


def trained(folder: Path, env: dict[str, Any], guards: dict[str, Any]) -> Result:
    """Trains on an environment and evaluates the policy on the healthy one."""
    ppo = {
        "num_envs": 32, "batch_size": 32, "num_minibatches": 4, "num_updates_per_batch": 4, "unroll_length": 8,
        "learning_rate": 3e-3, "entropy_cost": 1e-3, "discounting": 0.95,
    }  # fmt: skip
    return train(
        folder, guards=guards, ppo=ppo, env={"episode_length": 100, "kwargs": env}, total_steps=60_000,
        eval={"num_evals": 1, "num_envs": 64, "env_kwargs": HEALTHY}, checkpoint={"asynchronous": False},
        network={"policy_hidden_layer_sizes": (32,), "value_hidden_layer_sizes": (32,)},
    )  # fmt: skip


def test_one_nan_in_a_thousand_steps_makes_the_policy_nan_without_guards(tmp_path: Path) -> None:
    done = trained(tmp_path, ONE_IN_A_THOUSAND, GUARDS_OFF)
    assert done.stop_reason.name == "state_not_finite"
    assert done.metrics["eval/episode_reward"] is None  # the actions are NaN, so every episode is aborted
    assert done.metrics["eval/aborted_share"] == 1.0 and events(tmp_path, "evaluation_void")


def test_default_guards_give_a_policy_as_good_as_without_faults(tmp_path: Path) -> None:
    clean, faulty = (trained(tmp_path / str(env["fault"]), env, {}) for env in (HEALTHY, ONE_IN_A_THOUSAND))
    best, value = (done.metrics["eval/episode_reward"] for done in (clean, faulty))
    assert best is not None and value is not None
    assert best > 60.0  # of at most 100; an untrained policy falls off the edge
    assert value >= 0.95 * best
    assert clean.history[-1]["guards/quarantine/trips"] == 0
    trips = faulty.history[-1]["guards/quarantine/trips"]
    assert trips is not None and 20 <= trips <= 120  # about one in a thousand of 60,000 steps
    assert faulty.history[-1]["guards/quarantine/physics"] == trips
    assert faulty.history[-1]["guards/finite_update/trips"] == 0
    assert sum(event["physics"] for event in events(faulty.run_dir, "guard_tripped")) == trips
    floats = [array for array in checkpoint(faulty.run_dir)[0].values() if array.dtype.kind == "f"]
    assert all(np.isfinite(array).all() for array in floats)
