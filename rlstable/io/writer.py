"""What is written beside the computing, by a thread of its own: nobody waits for a disk or a service."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Writer:
    """Makes calls in another thread, one after another in the order in which they were given.

    A process that ends makes the calls that are left; one that is killed does not.

    Args:
        most: How many calls may wait before `ahead` waits for room: a disk that stands still must not fill the memory.
    """

    def __init__(self, most: int = 1000):
        self._thread = ThreadPoolExecutor(1, "writing")
        self._room = threading.Semaphore(most)

    def ahead(self, call: Callable[..., None], *args: Any) -> None:
        """Has a call made soon; waits where too many are left. Not for calls from within a call."""
        self._room.acquire()
        self._thread.submit(call, *args).add_done_callback(lambda _: self._room.release())

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Has a call made soon, however many are left: for what is rare."""
        self._thread.submit(call, *args)

    def wait(self) -> None:
        """Returns when all calls that were given are made."""
        self._thread.submit(int).result()

    def close(self) -> None:
        """Makes what is left and ends the thread; may be called again, and no call can be given then."""
        self._thread.shutdown()
