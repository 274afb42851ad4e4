"""Writes the report page of a run, while it trains and when it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlstable.io.files import write_atomically
from rlstable.report.page import page
from rlstable.report.run_record import read_record, read_records
from rlstable.runner.listener import Listener, Row
from rlstable.runner.seed import Seed

_SECONDS = 30.0  # between two live pages
_SHARE = 0.02  # greatest share of the time that goes into pages; long runs have large pages


class ReportPage(Listener):
    """Writes `report.html` every 30 seconds while a run trains, in a separate thread, and when it ends.

    An error of a live page is ignored, because the next one follows; an error of the last page is reported.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._run_dir: Path | None = None
        self._seeds: Mapping[int, Seed] = {}
        self._clock = clock
        self._due = float("-inf")
        self._writing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "report")

    def opened(self, run_dir: Path, seeds: Mapping[int, Seed]) -> None:
        self._run_dir, self._seeds = run_dir, seeds

    def row(self, seed: int, step: int, row: Row) -> None:
        del seed, step, row
        if self._clock() >= self._due and (self._writing is None or self._writing.done()):
            self._writing = self._thread.submit(self._write)

    def ended(self, folder: Path, fields: Mapping[str, Any]) -> None:
        if folder == self._run_dir:
            self._thread.shutdown()  # the page at the end stays
        records = read_records(folder) if "seeds" in fields else [read_record(folder)]
        write_atomically(folder / "report.html", page(records))

    def _write(self) -> None:
        started, folder = self._clock(), self._run_dir
        if folder and not any(seed.saving.gone for seed in self._seeds.values()):  # the folder is still this run's
            with contextlib.suppress(Exception):
                write_atomically(folder / "report.html", page(read_records(folder), refresh=True))
        ended = self._clock()
        self._due = ended + max(_SECONDS, (ended - started) / _SHARE)
