"""Warnings of runs that end with hidden trouble: `result.json`, console, page, several seeds and resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_runner import ITERATION, quick
from toys import GUARDS_OFF

from rlstable.io.run_folder import read_result
from rlstable.report.page import page
from rlstable.report.run_record import read_record
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
NAN_REWARDS: dict[str, Any] = {"name": "toys:PointMass", "kwargs": {"fault": "reward", "probability": 1.0}}
PLAIN = {"console": "plain"}
# Most rewards are not finite, but every iteration has some valid samples.
TORN: dict[str, Any] = {
    "env": {"kwargs": {"fault": "reward", "probability": 0.8}},
    "guards": {"storm": {"enabled": False}},
}


def warnings(folder: Path) -> list[str]:
    left = read_result(folder)
    assert left is not None
    return [warning["name"] for warning in left["warnings"]]


def test_completed_run_that_rejected_most_transitions_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = TrainingLoop(quick(**TORN, logging=PLAIN), tmp_path).run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.completed, 0)
    assert warnings(tmp_path)[:2] == ["transitions_rejected", "evaluations_void"]
    said = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    last = said[-len(warnings(tmp_path)) :]
    assert [words[:2] for words in last] == [["warning", f"{name}:"] for name in warnings(tmp_path)]
    shown = (tmp_path / "report.html").read_text()
    assert shown == page([read_record(tmp_path)])
    assert f'<dt>warnings</dt><dd><span class="bad">{", ".join(warnings(tmp_path))}</span></dd>' in shown
    assert "guards rejected" in shown


def test_run_without_guards_whose_returns_are_nan_says_so(tmp_path: Path) -> None:
    result = TrainingLoop(quick(guards=GUARDS_OFF, env=NAN_REWARDS, total_steps=8 * ITERATION), tmp_path).run()
    assert result.stop_reason is StopReason.state_not_finite  # all steps were trained, but the policy is not finite
    assert warnings(tmp_path) == ["loss_not_finite", "evaluations_void"]


def test_seeds_say_their_warnings_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = quick(guards=GUARDS_OFF, env=NAN_REWARDS, total_steps=8 * ITERATION, seeds=2, logging=PLAIN)
    TrainingLoop(config, tmp_path).run()
    left = read_result(tmp_path)
    assert left is not None
    own = [(warning["seed"], warning["name"]) for warning in left["warnings"]]
    assert own == [(seed, name) for seed in (0, 1) for name in ("loss_not_finite", "evaluations_void")]
    printed = capsys.readouterr().out.splitlines()
    assert sum("warning" in line and "seeds 0, 1: loss_not_finite: " in line for line in printed) == 1


def test_resumed_run_warns_as_the_uninterrupted_one(tmp_path: Path) -> None:
    TrainingLoop(quick(**TORN, total_steps=4 * ITERATION), tmp_path / "whole").run()
    TrainingLoop(quick(**TORN, total_steps=2 * ITERATION), tmp_path / "parts").run()
    TrainingLoop(quick(**TORN, total_steps=4 * ITERATION, resume="auto"), tmp_path / "parts").run()
    whole, parts = (read_result(tmp_path / name) for name in ("whole", "parts"))
    assert whole is not None and parts is not None
    assert whole["warnings"][0] == parts["warnings"][0]
    assert whole["warnings"][0]["name"] == "transitions_rejected"


def test_short_run_in_which_nothing_was_learned_does_not_complete(tmp_path: Path) -> None:
    """Four iterations are within the patience of the update guard, and not one update was accepted."""
    result = TrainingLoop(quick(fault={"site": "gradient", "probability": 1.0}), tmp_path).run()
    assert result.history[-1]["training/updates"] == 0
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.no_update_accepted, 4)
