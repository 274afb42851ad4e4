"""Rows of iterations without an accepted update, and the advice where that is how a run ends."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from test_runner import ITERATION, lines, quick
from toys import GUARDS_OFF

from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def test_row_without_an_accepted_update_lacks_the_means_over_updates(tmp_path: Path) -> None:
    fault = {"site": "gradient", "probability": 1.0, "start": 1, "iterations": 1}
    result = TrainingLoop(quick(fault=fault), tmp_path).run()
    assert [row["training/accepted_share"] for row in result.history] == [1.0, 0.0, 1.0, 1.0]
    missing = result.history[0].keys() - result.history[1].keys()
    assert {"training/learning_rate", "training/value_learning_rate", "training/v_loss", "training/entropy"} <= missing
    assert not [key for row in result.history for key, value in row.items() if value is not None and math.isnan(value)]
    assert None not in lines(tmp_path / "metrics.jsonl")[1].values()


def test_number_that_was_learned_from_and_is_nan_stays_in_the_row(tmp_path: Path) -> None:
    result = TrainingLoop(quick(guards=GUARDS_OFF, fault={"site": "gradient", "probability": 1.0}), tmp_path).run()
    assert math.isnan(result.history[-1]["training/grad_norm"] or 0.0)


def test_page_shows_the_rate_of_each_network(tmp_path: Path) -> None:
    TrainingLoop(quick(), tmp_path).run()
    shown = (tmp_path / "report.html").read_text()
    (figure,) = [part for part in shown.split("<figure") if "<figcaption>Learning rate" in part]
    assert "of the policy; the critic&#x27;s is dashed" in figure
    assert figure.count("<path") + figure.count("<polyline") >= 2


def test_advice_after_a_rate_far_too_high_names_the_limiter(tmp_path: Path) -> None:
    """No guard trips: the KL limiter passes over every minibatch, until the patience of the update guard ends."""
    guards = {"finite_update": {"patience": 2}, "limiters": {"kl": 1e-9}}
    config = quick(guards=guards, ppo={"learning_rate": 1e6}, total_steps=20 * ITERATION)
    runner = TrainingLoop(config, tmp_path)
    result = runner.run()
    assert result.stop_reason is StopReason.no_update_accepted
    left = read_result(tmp_path)
    assert left is not None
    assert "Updates were rejected by limiters/kl (100%)" in left["advice"]
    assert "guards/spike" not in left["advice"] and "divide ppo.learning_rate by 100" in left["advice"]
