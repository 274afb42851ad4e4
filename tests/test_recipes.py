"""Shipped recipes start without trips: a guard that trips in a recipe of ours points at the recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

ITERATIONS = 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["walker2d"])
def test_recipe_for_an_accelerator_starts_without_a_trip_and_with_small_values(name: str, tmp_path: Path) -> None:
    """With a value network of five layers and unclipped values, the value loss reached 10^8 within four iterations."""
    words = [
        f"env={name}",
        "recipe_for=accelerator",
        "devices=1",
        "logging=quiet",
        "checkpoint=off",
        "eval.num_evals=1",
    ]
    steps = ITERATIONS * compose(words).env_steps_per_iteration
    result = TrainingLoop(compose([*words, f"total_steps={steps}"]), tmp_path / "run").run()
    assert result.stop_reason is StopReason.completed
    assert not any(value for key, value in result.history[-1].items() if key.endswith("/trips"))
    assert max(row["training/v_loss"] for row in result.history) < 100.0
