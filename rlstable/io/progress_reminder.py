"""Prints "still running" lines during long operations."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator


@dataclasses.dataclass
class _Work:
    what: str
    usual: str
    started: float
    told: float


class ProgressReminder:
    """Tells what takes long, again and again while it lasts.

    One thread looks after all of it: to start one per iteration takes as long as a hundredth of a short one.

    Args:
        patience: Seconds between two words.
        tell: Called with each.
        clock: Seconds.
    """

    def __init__(self, patience: float, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._patience = patience
        self._tell = tell
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: list[_Work] = []
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def working(self, what: str, expected: float | None = None) -> Iterator[None]:
        """Tells of this for as long as the block takes.

        Args:
            what: What is done in the block.
            expected: Seconds it may take, if known.
        """
        now = self._clock()
        work = _Work(what, "" if expected is None else f" of about {expected:.0f} s", now, now)
        with self._lock:
            self._under_way.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._under_way.remove(work)

    def _watch(self) -> None:
        """Looks at the innermost work now and then, until there is none."""
        while True:
            time.sleep(self._patience / 4)
            with self._lock:
                if not self._under_way:
                    self._thread = None
                    return
                work, now = self._under_way[-1], self._clock()
                if now - work.told < self._patience:
                    continue
                work.told = now
            self._tell(f"{work.what}: {now - work.started:.0f} s{work.usual} so far")
