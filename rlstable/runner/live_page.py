"""Writes `report.html` now and then while a run trains; the page in a browser loads itself again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlstable.io.files import write_atomically
from rlstable.io.logbook import Metrics
from rlstable.report.page import page
from rlstable.report.run_record import read_records

_SECONDS = 30.0  # between two pages
_SHARE = 0.02  # greatest share of the time that goes into pages; long runs have large pages


class LivePage:
    """Sink that writes the report page of a running run, in the thread of the services. All seeds share one.

    The page is a convenience: if it cannot be written, nothing is reported. The page at the end reports its errors.

    Args:
        run_dir: The run folder.
        owns_folder: Returns whether the folder is still this run's.
        clock: Returns seconds; for tests.
    """

    def __init__(self, run_dir: Path, owns_folder: Callable[[], bool], clock: Callable[[], float] = time.monotonic):
        self._run_dir = run_dir
        self._owns_folder = owns_folder
        self._clock = clock
        self._due = float("-inf")
        self._stopped = False
        self._lock = threading.Lock()

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes the page if it is due."""
        del step, metrics
        if (started := self._clock()) < self._due:
            return
        with self._lock:  # each of several seeds has a thread
            if started < self._due or self._stopped or not self._owns_folder():
                return
            with contextlib.suppress(Exception):
                write_atomically(self._run_dir / "report.html", page(read_records(self._run_dir), refresh=True))
            ended = self._clock()
            self._due = ended + max(_SECONDS, (ended - started) / _SHARE)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Does nothing: events are on the next page."""

    def stop(self) -> None:
        """Writes no further page, so that the page at the end stays."""
        with self._lock:
            self._stopped = True

    def close(self) -> None:
        """Does nothing: the page belongs to all seeds, and the run stops it."""
