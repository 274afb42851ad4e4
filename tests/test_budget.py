"""Budgets of lines per folder: every line is read and maintained, and a budget makes the next one a decision."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Lines of Python per folder of the package; "" is the top level. Lower a number after a deletion; a larger number needs
# an entry in docs/decisions.md.
PACKAGE = {
    "": 1025, "brax_ppo": 530, "cli": 605, "compilation": 955, "config": 1630, "device": 1165, "doctor": 1200,
    "envs": 2830, "export": 560, "faults": 400, "guards": 980, "gym": 440, "io": 2230, "policy": 850, "ppo": 3150,
    "render": 1070, "replay": 470, "report": 1430, "robot": 3035, "runner": 3480, "supervise": 2150,
}  # fmt: skip
OTHERS = {"scripts": 3415, "tests": 30_000}
DOCS = 5165  # lines of Markdown


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
