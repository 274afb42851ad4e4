"""Signals: the first one ends a run between two iterations, also while a program compiles; a second one at once.

Python runs signal handlers in the main thread, but not while XLA compiles there. The wake-up pipe is
written by the C handler at once, and a thread reads it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_STOP = (signal.SIGINT, signal.SIGTERM)
# Signals that schedulers send before the end; ignored unless a handler is set, as submitit does.
_REQUEUE = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


class Signals:
    """Listens while it is entered. Outside the main thread nothing is listened to.

    A signal that the process was started to ignore stays ignored: a script's Ctrl-C does not reach what the script has
    put into the background.

    If another handler of SIGUSR1 or SIGUSR2 exists (submitit puts a job back into the queue that way), the signal ends
    the run too, and the other handler is called once everything is saved. Another handler of SIGTERM is left alone.

    Args:
        hard: Whether the process is the run's own: a signal while a program compiles, and any second signal, then end
            it at once. In another program's process the second signal goes to its own handler.

    Attributes:
        received: Number of the first signal, None before it.
    """

    def __init__(self, hard: bool = False):
        self.received: int | None = None
        self._hard = hard
        self._previous: dict[int, Any] = {}
        self._leave: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self._pipe: tuple[int, int] | None = None
        self._old_fd = -1

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        requeue = [number for number in _REQUEUE if callable(signal.getsignal(number))]
        stop = [number for number in _STOP if signal.getsignal(number) is not signal.SIG_IGN]
        if requeue and signal.SIGTERM in stop:
            stop.remove(signal.SIGTERM)
        for number in (*stop, *requeue):
            self._previous[number] = signal.signal(number, self._heard)
        if self._hard:
            self._pipe = os.pipe()
            for end in self._pipe:
                os.set_blocking(end, end == self._pipe[0])
            self._old_fd = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            threading.Thread(target=self._read, args=(self._pipe[0],), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_fd)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
            self._pipe = None
        self.hand_on()

    @contextlib.contextmanager
    def leaving_by(self, leave: Callable[[], None]) -> Iterator[None]:
        """Sets the function that saves the run and ends the process while the main thread cannot run handlers.

        It is called in another thread, with a signal that came during the block.
        """
        with self._lock:
            self._leave = leave if self._hard else None
        if self.received is not None:
            self._leave_if_deaf()
        try:
            yield
        finally:
            with self._lock:
                self._leave = None

    def hand_on(self) -> None:
        """Calls the previous handler of the signal that ended the run."""
        if self.received in _REQUEUE and self.received in self._previous:
            self._previous[self.received](self.received, None)

    def _heard(self, number: int, _: Any) -> None:
        if self._hard:
            return  # the thread has received it too
        self.received = number
        for own in _STOP:
            if own in self._previous:
                signal.signal(own, self._previous[own])

    def _read(self, pipe: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(pipe, "rb", buffering=0) as stream:
            while read := stream.read(1):
                number = read[0]
                if number not in self._previous:
                    continue
                if self.received is not None:
                    os._exit(128 + number)
                self.received = number
                # In another thread, so that this thread receives the second signal.
                threading.Thread(target=self._leave_if_deaf, daemon=True).start()

    def _leave_if_deaf(self) -> None:
        with self._lock:  # the thread that ends the block waits here until the process has ended
            if self._leave is not None:
                self._leave()
