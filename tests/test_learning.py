"""The shipped recipes for accelerators start without trips; `make learn` has the returns of those for a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason


@pytest.mark.slow
def test_recipe_for_an_accelerator_starts_without_a_trip_and_with_small_values(tmp_path: Path) -> None:
    """With a value network of five layers and unclipped values, the value loss reached 10^8 within four iterations."""
    words = ["env=walker2d", "recipe_for=accelerator", "devices=1", "logging=quiet", "checkpoint=off"]
    words.append("eval.num_evals=1")
    steps = 10 * compose(words).env_steps_per_iteration
    result = TrainingLoop(compose([*words, f"total_steps={steps}"]), tmp_path / "run").run()
    assert result.stop_reason is StopReason.completed
    assert {name: count for name, count in result.history[-1].items() if name.endswith("/trips") and count} == {}
    assert max(row["training/v_loss"] for row in result.history) < 100.0
