"""Observations and rewards in any unit train as in units of 1, without a trip of a guard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
TINY = (
    "env=import", "env.name=users:Units", "env.episode_length=100", "network=small", "ppo.num_envs=32",
    "ppo.batch_size=32", "ppo.num_minibatches=8", "ppo.unroll_length=16", "ppo.learning_rate=1e-3", "eval.num_envs=16",
    "eval.num_evals=1", "logging.console=off", "devices=1",
)  # fmt: skip


def train(folder: Path, kwargs: str, *overrides: str) -> tuple[Result, set[str]]:
    """The result, and the kinds of its events; no sample may be masked."""
    result = TrainingLoop(compose([*TINY, f"env.kwargs={{{kwargs}}}", *overrides]), folder).run()
    row: dict[str, Any] = dict(result.history[-1])
    assert {name: row[name] for name in row if name.startswith("guards/") and row[name]} == {}
    return result, {json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines()}


@pytest.mark.parametrize("kwargs", ["observation: 1e8, offset: 1e8", "unit: 2e5"])
def test_large_units_mask_no_sample_and_change_no_precision(tmp_path: Path, kwargs: str) -> None:
    result, kinds = train(tmp_path, kwargs, "ppo=cpu", "total_steps=16_384")
    assert result.stop_reason.name == "completed"
    assert kinds.isdisjoint({"precision_changed", "incident", "rolled_back", "guard_tripped"})
    units = float(kwargs.rsplit(": ", 1)[1]) if kwargs.startswith("unit") else 1.0
    assert result.history[-1]["training/reward_greatest"] > 0.1 * units  # a bound would cut all rewards alike


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kwargs", ["unit: 1.0", "unit: 2e4", "unit: 2e5", "observation: 1e8, offset: 1e8"])
def test_policy_learns_in_any_unit(tmp_path: Path, kwargs: str, seed: int) -> None:
    result, _ = train(tmp_path, kwargs, "ppo=cpu", "total_steps=240_000", f"seed={seed}", "eval.num_evals=4")
    units = float(kwargs.rsplit(": ", 1)[1]) if kwargs.startswith("unit") else 1.0
    returns = [row["eval/episode_reward"] for row in result.history if "eval/episode_reward" in row]
    assert max(returns) / units > -1.0  # of about -100 for a policy that runs away
