"""Stop requests (signals and the wall-clock limit), including while XLA is compiling."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rlstable.io.console import Console
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import StopReason


class StopRequest:
    """Stop requests: signals and the wall-clock limit, also while XLA compiles.

    Args:
        console: Shows what compiles.
        depart: Saves the run and ends it; called in another thread while XLA compiles in this one.
        signals: Signals that are already caught; None to catch them in `listening`.
        limit: Seconds from now after which no iteration starts; None for no limit.
    """

    def __init__(
        self,
        console: Console,
        depart: Callable[[StopReason], None],
        signals: Signals | None = None,
        limit: float | None = None,
    ):
        self._started = time.monotonic()
        self._limit = limit
        self._console = console
        self._depart = depart
        self._signals = signals

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop reason of the first signal; None without a signal."""
        number = None if self._signals is None else self._signals.received
        if number is None:
            return None
        return StopReason.interrupted if number == signal.SIGINT else StopReason.preempted

    def requested(self, next_one: float) -> StopReason | None:
        """The stop reason that a signal or the clock requests after an iteration.

        Args:
            next_one: Seconds of another iteration.
        """
        by_signal = self.stop_reason
        if by_signal is not None or self._limit is None:
            return by_signal
        return StopReason.time_limit if time.monotonic() - self._started + next_one > self._limit else None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens for signals, unless the caller listens already."""
        if self._signals is not None:
            yield
            return
        with Signals() as self._signals:
            yield

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Shows what compiles, and reacts to a signal meanwhile."""
        leaving = contextlib.nullcontext() if self._signals is None else self._signals.leaving_by(self._leave)
        with self._console.compiling(name), leaving:
            yield

    def _leave(self) -> None:
        """Departs and ends the process."""
        stop_reason = self.stop_reason or StopReason.interrupted
        try:
            self._depart(stop_reason)
            if self._signals is not None:
                self._signals.hand_on()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop_reason.exit_code)
