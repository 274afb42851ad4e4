"""The pages of the studies are those of the results that lie beside the pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from commands import ROOT

from scripts import results
from scripts.bench import page as bench_page
from scripts.glitch import __main__ as glitch
from scripts.harm import __main__ as harm
from scripts.results import Row
from scripts.stability import __main__ as stability
from scripts.stability import page as stability_page
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page
from scripts.tasks import __main__ as tasks
from scripts.tasks import page as tasks_page

DOCS = ROOT / "docs"
# By study and page: the function that writes the page beside the file of results.
PAGES: dict[str, Callable[[Sequence[Row], Path], None]] = {
    "bench benchmarks": lambda rows, out: bench_page.write(rows, out.with_name("benchmarks.md"), out),
    "glitch survival": glitch.write_page,
    "harm harm": harm.write_page,
    "stability stability": lambda rows, out: stability_page.write(rows, stability.TASKS, out),
    "survival survival": lambda rows, out: survival_page.write(rows, [*survival.CASES], out, survival.possible),
    "tasks tasks": lambda rows, out: tasks_page.write(rows, tasks.tasks(), out.with_suffix(".md")),
    "tasks gallery": tasks.write_gallery,
}


@pytest.mark.parametrize("written", PAGES)
def test_page_is_the_one_that_its_results_give(written: str, tmp_path: Path) -> None:
    """Recipes that have changed since the training of a task are marked by the command alone."""
    study, name = written.split()
    page, out = tmp_path / f"{name}.md", tmp_path / f"{study}.jsonl"
    before = (DOCS / page.name).read_text().replace(" †", "")
    page.write_text(before)
    out.touch()
    PAGES[written](results.read(DOCS / out.name), out)
    assert page.read_text() == before, f"stale; say: python -m scripts.{study} --page"


def test_readme_has_the_costs_that_the_benchmark_measured(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text())
    bench_page.write(results.read(DOCS / "bench.jsonl"), tmp_path / "benchmarks.md", readme)
    assert readme.read_text() == (ROOT / "README.md").read_text()
