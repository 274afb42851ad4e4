"""Writes rows in a background thread, so that training does not wait for a disk or a service."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Makes calls in another thread, one after another in the order in which they were given.

    A process that ends makes the calls that are left; one that is killed does not.

    Args:
        most: How many calls may wait before `ahead` waits for room: a disk that stands still must not fill the memory.
    """

    def __init__(self, most: int = 1000):
        self._thread = ThreadPoolExecutor(1, "writing")
        self._room = threading.Semaphore(most)

    def ahead(self, call: Callable[..., object], *args: object) -> None:
        """Has a call made soon; waits where too many are left. Not for calls from within a call."""
        self._room.acquire()
        self._give(call, *args).add_done_callback(lambda _: self._room.release())

    def soon(self, call: Callable[..., object], *args: object) -> None:
        """Has a call made soon, however many are left: for what is rare."""
        self._give(call, *args)

    def now(self, call: Callable[[], object]) -> None:
        """Makes a call after all that were given and waits for it; what it raises is raised here."""
        self._thread.submit(call).result()

    def wait(self) -> None:
        """Returns when all calls that were given are made."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Makes what is left and ends the thread; may be called again, and no call can be given then."""
        self._thread.shutdown()

    def _give(self, call: Callable[..., object], *args: object) -> Future[object]:
        future = self._thread.submit(call, *args)
        future.add_done_callback(_tell_failure)
        return future


def _tell_failure(future: Future[object]) -> None:
    error = future.exception()
    if error is not None:
        warnings.warn(f"rlstable: not written: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
