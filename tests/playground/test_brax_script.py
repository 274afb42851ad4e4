"""A user's script for Brax's PPO with one changed import trains a task of Playground, saves it and plays it again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mujoco_playground")

from quick_compile import environment as quick_environment

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "brax_script.py"


def run(logdir: Path, *flags: str) -> list[dict[str, Any]]:
    """The lines that the script prints as JSON."""
    command = [sys.executable, str(SCRIPT), f"--logdir={logdir}", *flags]
    environment = os.environ | quick_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_script_trains_saves_and_plays_only(tmp_path: Path) -> None:
    *progress, played = run(tmp_path / "train")
    assert [row["steps"] for row in progress] == [0, 64, 128]
    assert all(0.0 < row["reward"] <= 20.0 for row in progress)
    assert 0.0 < played["played"] <= 20.0

    saved = tmp_path / "train" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["000000000064", "000000000128"]
    again = run(tmp_path / "play", "--play_only", f"--load_checkpoint_path={saved / '000000000128'}")
    assert again[-1] == played, "the restored policy plays the same episode"
