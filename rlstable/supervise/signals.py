"""Signals: the first signal ends a run between two iterations or during compilation; the second ends it at once.

Python runs signal handlers in the main thread, but not while XLA compiles in the main thread. The C handler writes to a
wake-up pipe at once, and a thread reads the pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_HANG_UP = signal.SIGHUP  # the terminal was closed
_STOP = (signal.SIGINT, signal.SIGTERM, _HANG_UP)
# Signals that schedulers send before the time limit; ignored unless another library, such as submitit, handles them.
_REQUEUE = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Context manager that catches signals; outside the main thread it does nothing.

    If the process ignores a signal at its start, the signal stays ignored: a script's Ctrl-C does not stop the
    processes that the script has started in the background, and `nohup` keeps a run alive without its terminal.
    A second SIGHUP is ignored, because shell and kernel both send one.

    If another handler of SIGUSR1 or SIGUSR2 exists (submitit queues a job again with it), the signal ends the run too.
    The other handler is then called once everything is saved. SIGTERM is then left to its handler.

    With `owns_process` the process only runs this training. Then a signal during compilation and any second signal end
    the process at once. Otherwise the second signal goes to the previous handler.
    """

    def __init__(self, owns_process: bool = False):
        self.received: int | None = None  # number of the first signal
        self.announce: Callable[[int], None] = lambda number: None  # called with it at once, perhaps by another thread
        self.owns_process = owns_process
        self._previous: dict[int, Any] = {}
        self._exit: Callable[[], None] | None = None
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
            self._previous[number] = signal.signal(number, self._handle)
        if self.owns_process:
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
        self.call_previous_handler()

    @contextlib.contextmanager
    def exit_handler(self, save_and_exit: Callable[[], None]) -> Iterator[None]:
        """Sets the function that saves the run and ends the process while the main thread cannot run handlers.

        A signal during the block calls the function in another thread.
        """
        with self._lock:
            self._exit = save_and_exit if self.owns_process else None
        if self.received is not None:
            self._exit_if_compiling()
        try:
            yield
        finally:
            with self._lock:
                self._exit = None

    def call_previous_handler(self) -> None:
        """Calls the previous handler of the signal that ended the run."""
        if self.received in _REQUEUE and self.received in self._previous:
            self._previous[self.received](self.received, None)

    def _handle(self, number: int, _: Any) -> None:
        if self.owns_process or (self.received is not None and number == _HANG_UP):
            return  # the thread receives the signal too
        self.received = number
        for stop in _STOP:
            if stop in self._previous and stop != _HANG_UP:
                signal.signal(stop, self._previous[stop])
        self._announce(number)

    def _announce(self, number: int) -> None:
        """Announces the first signal in another thread, because a blocked output must not delay the second signal."""

        def announce() -> None:
            with contextlib.suppress(Exception):
                self.announce(number)

        threading.Thread(target=announce, daemon=True).start()

    def _read(self, pipe: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(pipe, "rb", buffering=0) as stream:
            while read := stream.read(1):
                number = read[0]
                if number not in self._previous:
                    continue
                if self.received is not None:
                    if number == _HANG_UP:
                        continue
                    os._exit(128 + number)
                self.received = number
                self._announce(number)
                # In another thread, so that this thread receives the second signal.
                threading.Thread(target=self._exit_if_compiling, daemon=True).start()

    def _exit_if_compiling(self) -> None:
        with self._lock:  # the thread that ends the block waits here until the process has ended
            if self._exit is not None:
                self._exit()
