"""Budgets of lines per folder: every line is read and maintained, and a budget makes the next one a decision."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lines of Python per folder of the package; "" is the top level. A larger number needs an entry in docs/decisions.md.
PACKAGE = {
    "": 800, "cli": 1150, "compilation": 1250, "config": 1510, "device": 1630, "doctor": 1550, "envs": 2790,
    "export": 500, "faults": 460, "guards": 1130, "io": 3800, "policy": 1320, "ppo": 3220, "render": 1460,
    "replay": 1110, "report": 2260, "runner": 5100, "supervise": 3300,
}  # fmt: skip
OTHERS = {"scripts": 5700, "tests": 39_500}
DOCS = 5300  # lines of Markdown


def lines(folder: Path, pattern: str = "*.py") -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob(pattern))


def test_every_folder_of_the_package_has_a_budget() -> None:
    folders = {path.name for path in (ROOT / "rlstable").iterdir() if (path / "__init__.py").exists()}
    assert folders == PACKAGE.keys() - {""}


@pytest.mark.parametrize("folder", PACKAGE)
def test_folder_of_the_package_keeps_its_budget(folder: str) -> None:
    root = ROOT / "rlstable"
    found = lines(root / folder) if folder else sum(len(path.read_text().splitlines()) for path in root.glob("*.py"))
    assert found <= PACKAGE[folder]


@pytest.mark.parametrize("folder", OTHERS)
def test_scripts_and_tests_keep_their_budgets(folder: str) -> None:
    assert lines(ROOT / folder) <= OTHERS[folder]


def test_docs_keep_their_budget() -> None:
    assert lines(ROOT / "docs", "*.md") <= DOCS
