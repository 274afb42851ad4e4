"""Training a robot from its model file on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import SIZES, typed
from moments import MODELS

from rlstable.train import main

WORDS = ["env=robot_swingup", f"env.xml={MODELS / 'cart_pole.xml'}", "ppo=default", "total_steps=128", *SIZES]


def test_robot_trains_from_a_file_and_reports_each_term(tmp_path: Path) -> None:
    assert typed(main, *WORDS, "eval.num_evals=1", f"hydra.run.dir={tmp_path}") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["stop_reason"] == "completed" and result["step"] == 128
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = {name for line in lines for name in line}
    assert {f"episode/reward/{term}" for term in ("raised", "joint_speed", "action_rate")} <= names
    assert "Reward by term" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["+env.task.rewards.uprigth={weight: 1}"], "env.task.rewards.uprigth: there is no term"),
        (["env.xml=/missing.xml"], "env.xml: there is no file /missing.xml"),
        (["env.task.rewards.raised.weight=much"], "env.task.rewards.raised.weight: 'much' must be a number"),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert typed(main, *WORDS, *words, f"hydra.run.dir={tmp_path / 'run'}") == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"rlstable: {message}")
