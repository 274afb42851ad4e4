"""SIGINT and SIGTERM, which end a run between two iterations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any


class Signals:
    """Turns the first SIGINT or SIGTERM into a flag that is read between iterations; a second one acts at once.

    Args:
        notify: Called with the number of the first one. Outside the main thread nothing is listened to.
    """

    def __init__(self, notify: Callable[[int], None]):
        self._notify = notify
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._first)
        return self

    def _first(self, number: int, _: Any) -> None:
        signal.signal(number, self._previous[number])
        self._notify(number)

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
