"""Prints "still running" lines during long work."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class _Work:
    what: str
    expected: str
    started: float
    printed: float


class Reminder:
    """Prints "still running" lines about the innermost long work, from one background thread."""

    def __init__(self, patience: float, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._patience = patience
        self._write = write
        self._clock = clock
        self._lock = threading.Lock()
        self._running: list[_Work] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def working(self, what: str, expected: float | None = None) -> Iterator[None]:
        """Context manager that prints lines while the block runs, which takes `expected` seconds if that is known."""
        now = self._clock()
        work = _Work(what, "" if expected is None else f" of about {expected:.0f} s", now, now)
        with self._lock:
            self._running.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(work)

    def _watch(self) -> None:
        while True:
            time.sleep(self._patience / 4)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                work, now = self._running[-1], self._clock()
                if now - work.printed < self._patience:
                    continue
                work.printed = now
            self._write(f"{work.what}: {now - work.started:.0f} s{work.expected} so far")
