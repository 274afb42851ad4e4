"""Budgets of lines: every line is read and maintained, and a budget makes the next one a decision.

Lower a number after a deletion; a larger number needs an entry in docs/decisions.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What a paper would describe; what people do with a run; everything else makes a run.
CORE = (
    "guards", "ppo", *(f"device/{name}.py" for name in ("counter", "packed", "reflection", "shared", "sharding")),
    *(f"device/{name}.py" for name in ("precision", "transforms", "trees")),
    *(f"envs/{name}.py" for name in ("capture", "episodes", "shared_leaves", "vector")),
    *(f"supervise/{name}.py" for name in ("recovery", "remedies", "return_watch", "snapshots", "stop_reasons")),
)  # fmt: skip
APPS = (
    "brax_ppo", "demo", "doctor", "export", "gym", "listeners.py", "play.py", "render", "replay", "report", "robot",
    *(f"envs/{name}.py" for name in ("gymnasium_env", "gymnasium_specs", "gymnasium_tasks", "menagerie", "playground")),
)  # fmt: skip
BUDGETS = {"core": 6500, "run": 14_106, "apps": 10_568}
# Signatures and fields outside of `config/` that take the configuration of a run as a whole, instead of sections.
WHOLE_CONFIGS = 15
OTHERS = {"scripts": 3916, "tests": 29_556}
DOCS = 4696  # lines of Markdown


def lines(path: Path, pattern: str = "*.py") -> int:
    files = [path] if path.is_file() else path.rglob(pattern)
    return sum(len(file.read_text().splitlines()) for file in files)


def lines_of_rings() -> dict[str, int]:
    package = ROOT / "rlstable"
    for name in (*CORE, *APPS):
        assert (package / name).exists(), name
    core, apps = (sum(lines(package / name) for name in names) for names in (CORE, APPS))
    return {"core": core, "run": lines(package) - core - apps, "apps": apps}


@pytest.mark.parametrize("ring", BUDGETS)
def test_ring_of_the_package_keeps_its_budget(ring: str) -> None:
    assert lines_of_rings()[ring] <= BUDGETS[ring]


def test_no_more_parts_take_the_whole_configuration() -> None:
    files = [path for path in (ROOT / "rlstable").rglob("*.py") if path.parent.name != "config"]
    assert sum(len(re.findall(r"(?::|->) Config\b", path.read_text())) for path in files) <= WHOLE_CONFIGS


@pytest.mark.parametrize("folder", OTHERS)
def test_scripts_and_tests_keep_their_budgets(folder: str) -> None:
    assert lines(ROOT / folder) <= OTHERS[folder]


def test_docs_keep_their_budget() -> None:
    assert lines(ROOT / "docs", "*.md") <= DOCS
