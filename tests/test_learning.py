"""Returns on real physics rise in a short training, and shipped recipes start without trips."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlstable
from rlstable.cli.compose import compose
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason


def trips(result: rlstable.Result) -> dict[str, float]:
    """Guards that tripped, with their counts."""
    return {name: count for name, count in result.history[-1].items() if name.endswith("/trips") and count}


@pytest.mark.slow
@pytest.mark.parametrize(("env", "steps", "least"), [("ant", 1_000_000, 1300.0), ("halfcheetah", 400_000, 3000.0)])
def test_ant_and_halfcheetah_learn_with_the_recipe_for_a_cpu(
    tmp_path: Path, env: str, steps: int, least: float
) -> None:
    """An ant that stands returns at most 1,000, a half cheetah that stands 0."""
    more = ["recipe_for=cpu", "logging=quiet", "devices=1", "eval.num_envs=16", "eval.num_evals=6"]
    result = rlstable.fit(env, run_dir=tmp_path, total_steps=steps, overrides=more)
    returns = [row["eval/episode_reward"] for row in result.history if "eval/episode_reward" in row]
    assert max(returns[-2:]) >= least
    assert trips(result) == {}


ITERATIONS = 10


@pytest.mark.slow
def test_recipe_for_an_accelerator_starts_without_a_trip_and_with_small_values(tmp_path: Path) -> None:
    """With a value network of five layers and unclipped values, the value loss reached 10^8 within four iterations."""
    words = ["env=walker2d", "recipe_for=accelerator", "devices=1", "logging=quiet", "checkpoint=off"]
    words.append("eval.num_evals=1")
    steps = ITERATIONS * compose(words).env_steps_per_iteration
    result = TrainingLoop(compose([*words, f"total_steps={steps}"]), tmp_path / "run").run()
    assert result.stop_reason is StopReason.completed
    assert trips(result) == {}
    assert max(row["training/v_loss"] for row in result.history) < 100.0
