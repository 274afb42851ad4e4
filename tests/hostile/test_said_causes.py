"""Runs whose policy cannot be what its return says: one sign with the numbers and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toys import tiny_config

from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def test_mean_action_that_returns_nothing_is_said_in_console_summary_and_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        guards={}, env={"name": "users:Stiction"}, total_steps=30 * 64, eval={"num_evals": 10, "num_envs": 4},
        logging={"console": "plain"}, supervise={},
    )  # fmt: skip
    TrainingLoop(config, tmp_path).run()
    result = read_result(tmp_path)
    assert result is not None
    text = result["signs"]["evaluation_below_training"]["text"]
    assert re.match(
        r"evaluations of the mean action returned 0\.0, where training with sampled actions returned \d", text
    )
    assert "set eval.deterministic=false" in text
    printed = capsys.readouterr().out
    assert printed.count("sign evaluation_below_training: ") == 1
    assert f"sign         {text}" in printed
    assert text in (tmp_path / "report.html").read_text()
