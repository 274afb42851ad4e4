"""One NaN in a thousand steps ruins a training without guards, and costs nothing with guards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import GUARDS_OFF, tiny_config

from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
HEALTHY = {"fault": None}
ONE_IN_A_THOUSAND = {"fault": "physics", "probability": 1e-3}


def train(folder: Path, env: dict[str, Any], guards: dict[str, Any]) -> tuple[TrainingLoop, Result]:
    """Trains on an environment and evaluates the policy on the healthy one."""
    config = tiny_config(
        guards=guards,
        devices=1,
        total_steps=60_000,
        env={"name": "toys:PointMass", "episode_length": 100, "kwargs": env},
        eval={"num_evals": 1, "num_envs": 64, "env_kwargs": HEALTHY},
        ppo={
            "num_envs": 32, "batch_size": 32, "num_minibatches": 4, "num_updates_per_batch": 4, "unroll_length": 8,
            "learning_rate": 3e-3, "entropy_cost": 1e-3, "discounting": 0.95, "reward_scaling": 1.0,
        },
        network={"policy_hidden_layer_sizes": (32,), "value_hidden_layer_sizes": (32,)},
        logging={"console": "off"},
    )  # fmt: skip
    runner = TrainingLoop(config, folder)
    return runner, runner.run()


def finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


@pytest.fixture(scope="module")
def clean_return(tmp_path_factory: pytest.TempPathFactory) -> float:
    _, result = train(tmp_path_factory.mktemp("clean"), HEALTHY, {})
    value = result.metrics["eval/episode_reward"]
    assert value is not None
    assert value > 60.0  # of at most 100; an untrained policy falls off the edge
    assert result.history[-1]["guards/quarantine/trips"] == 0
    return value


def test_one_nan_in_a_thousand_steps_makes_parameters_nan_without_guards(tmp_path: Path) -> None:
    runner, result = train(tmp_path, ONE_IN_A_THOUSAND, GUARDS_OFF)
    assert not finite(runner.single.state.params)
    assert not finite(runner.single.state.normalizer)
    assert result.metrics["eval/episode_reward"] is None  # the actions are NaN, so every episode is aborted


def test_default_guards_give_a_policy_as_good_as_without_faults(tmp_path: Path, clean_return: float) -> None:
    runner, result = train(tmp_path, ONE_IN_A_THOUSAND, {})
    assert finite((runner.single.state.params, runner.single.state.opt_state, runner.single.state.normalizer))
    assert finite(runner.single.state.env_state)
    value = result.metrics["eval/episode_reward"]
    assert value is not None
    assert value >= 0.95 * clean_return
    trips = result.history[-1]["guards/quarantine/trips"]
    assert 20 <= trips <= 120  # about one in a thousand of 60,000 steps
    assert result.history[-1]["guards/quarantine/physics"] == trips
    assert result.history[-1]["guards/finite_update/trips"] == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    counted = sum(event["physics"] for event in events if event["kind"] == "guard_tripped")
    assert counted == trips
