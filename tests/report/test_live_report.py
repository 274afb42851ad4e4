"""The report page of a running run is written now and then, and never over the page at the end."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from toys import tiny_config

from rlstable.listeners import listeners_of
from rlstable.report.live import ReportPage
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
REFRESH = 'http-equiv="refresh"'


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def started(folder: Path) -> Path:
    """A folder of a run that has not ended."""
    folder.mkdir()
    (folder / "config.yaml").write_text("env: {name: ant}\n")
    return folder / "report.html"


def written(live: ReportPage) -> None:
    """Logs a row, and waits for the thread that writes."""
    live.row(0, 0, {})
    if live._writing is not None:
        live._writing.result()


def test_page_is_there_with_the_first_row_and_is_written_again_every_half_minute(tmp_path: Path) -> None:
    report, clock = started(tmp_path / "run"), Clock()
    live = ReportPage(clock)
    live.opened(report.parent, {})
    written(live)
    assert REFRESH in report.read_text()
    report.unlink()
    for clock.now, due in ((29.0, False), (31.0, True)):
        written(live)
        assert report.exists() == due


@pytest.mark.parametrize("reason", ["taken", "no run folder"])
def test_page_is_not_written_where_it_must_not_be(tmp_path: Path, reason: str) -> None:
    report = started(tmp_path / "run")
    live = ReportPage(Clock())
    seed = SimpleNamespace(saving=SimpleNamespace(gone=reason == "taken"))
    live.opened(report.parent, {0: seed})  # type: ignore[dict-item]
    if reason == "no run folder":
        (report.parent / "config.yaml").unlink()
    written(live)
    assert not report.exists()


def test_page_at_the_end_of_a_run_does_not_load_itself_again(tmp_path: Path) -> None:
    pages: list[str] = []
    report = tmp_path / "run" / "report.html"

    def look(step: int, row: object) -> None:
        del step, row
        while not report.exists():  # another thread writes it after the first row
            time.sleep(0.05)
        pages.append(report.read_text())

    config = tiny_config(total_steps=640, devices=1, logging={"console": "off"})
    TrainingLoop(config, tmp_path / "run", look, listeners=listeners_of(config.render, config.logging)).run()
    assert pages and all(REFRESH in text for text in pages)
    assert REFRESH not in report.read_text()
