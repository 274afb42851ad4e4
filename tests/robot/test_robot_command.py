"""Training a robot from its model file on the command line."""

from __future__ import annotations

import json
from pathlib import Path

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
