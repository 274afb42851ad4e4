"""The survival matrix: cases, tasks and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.config.faults import FaultConfig
from scripts import pages
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page


def row(case: str, side: str, value: float | None, **more: Any) -> dict[str, Any]:
    own = {"task": "toy", "side": side, "case": case, "seed": 0, "finished": True, "finite": True, "trips": {}}
    return {**own, "return": value, "seconds": 1.0, **more}


def test_every_site_has_a_case() -> None:
    """Every case is a fault that the configuration has."""
    assert {FaultConfig(**case.fault).site for case in survival.CASES.values()} == set(FaultConfig.sites())


def test_survival_page_shows_every_case_and_side(tmp_path: Path) -> None:
    """The picture is beside the page."""
    returns = {"off": 10.0, "default": 1000.0}
    rows = [row(case, side, value) for case in ("clean", "bad") for side, value in returns.items()]
    rows[-1]["trips"] = {"quarantine": 3}
    survival_page.write(rows, ["clean", "bad", "never run"], tmp_path / "survival.jsonl", lambda *_: True)
    page = (tmp_path / "survival.md").read_text()
    assert "| bad | 1.00 / 1.00 | 1.00 / 1.00 | quarantine 3 |" in page
    assert "never run" not in page
    assert (tmp_path / "survival.png").read_bytes().startswith(b"\x89PNG")


def test_rows_with_the_same_cells_share_a_row() -> None:
    assert pages.merged([("a", "1"), ("b", "2"), ("c", "1")]) == [["a; c", "1"], ["b", "2"]]


@pytest.mark.parametrize("task", survival.TASKS)
def test_every_task_has_100_iterations(task: str) -> None:
    """A fault starts in the same iteration of every task, and a solved task has time to collapse and to recover."""
    config = compose([*survival.TASKS[task]])
    assert config.total_steps == 100 * config.env_steps_per_iteration
    assert config.eval.num_envs == survival.EPISODES
