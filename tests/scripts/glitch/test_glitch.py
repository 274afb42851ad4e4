"""The study of wrong but finite numbers: tasks, cells and table."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from rlstable.config.faults import FaultConfig
from scripts import results
from scripts.glitch import __main__ as glitch


def row(name: str, rate: float, seed: int, value: float | None) -> results.Row:
    about = {"task": "dense", "side": "default", "glitch": name, "rate": rate, "seed": seed}
    return {**about, "return": value, "finite": value is not None, "finished": True}


@pytest.mark.parametrize("task", glitch.TASKS)
def test_every_task_is_a_valid_command(task: str) -> None:
    assert compose([*glitch.TASKS[task].overrides, "fault.site=reward"]).fault.site == "reward"


def test_every_glitch_is_a_fault_with_its_value() -> None:
    for wrong in glitch.GLITCHES.values():
        assert FaultConfig(site=wrong.site, value=wrong.value).number == wrong.value


def test_table_marks_the_cells_whose_least_seed_is_too_low(tmp_path: Path) -> None:
    """0.95 is enough up to one in a thousand, 0.85 at one in a hundred; a lost seed counts as 0."""
    rows = [row("none", 0.0, seed, 100.0) for seed in range(4)]
    for rate in glitch.RATES:
        rows += [row("reward +30", rate, 0, 98.0), row("reward +30", rate, 1, 90.0)]
    rows += [row("reward -30", 1e-3, 0, 96.0), row("reward -30", 1e-3, 1, None)]
    glitch.write_page(rows, tmp_path / "glitch.jsonl")
    page = (tmp_path / "survival.md").read_text()
    assert "| reward +30 | **0.94 / 0.90** | **0.94 / 0.90** | 0.94 / 0.90 |" in page
    assert "| reward -30 |  | **nan 0.48 / 0.00** |  |" in page
    assert "4 seeds, `env=import" in page
