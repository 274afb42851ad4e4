"""Writes rows in a background thread, so that training does not wait for a disk or a service."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Writer:
    """Runs calls in a background thread, one after another, in order.

    A process that ends normally runs the remaining calls; a killed process does not.

    Args:
        most: Number of queued calls at which `submit_bounded` blocks, so that a stalled disk does not fill the memory.
    """

    def __init__(self, most: int = 1000):
        self._thread = ThreadPoolExecutor(1, "writing")
        self._room = threading.Semaphore(most)

    def submit_bounded(self, call: Callable[..., object], *args: object) -> None:
        """Queues a call; blocks while too many calls are queued. Must not be called from the background thread."""
        self._room.acquire()
        self._submit(call, *args).add_done_callback(lambda _: self._room.release())

    def submit(self, call: Callable[..., object], *args: object) -> None:
        """Queues a rare call; never blocks."""
        self._submit(call, *args)

    def wait(self) -> None:
        """Waits until all queued calls have run."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Runs the remaining calls and ends the thread; may be called again. No calls are accepted afterwards."""
        self._thread.shutdown()

    def _submit(self, call: Callable[..., object], *args: object) -> Future[object]:
        future = self._thread.submit(call, *args)
        future.add_done_callback(_warn_failure)
        return future


def _warn_failure(future: Future[object]) -> None:
    error = future.exception()
    if error is not None:
        warnings.warn(f"rlstable: not written: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
