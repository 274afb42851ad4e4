"""Leaving by a signal: between two iterations, or while something compiles and the main thread hears nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

from rlstable.endings import Ending
from rlstable.io.console import Console
from rlstable.supervise.signals import Signals


class Leaving:
    """What a signal means to training.

    Args:
        console: Says what compiles.
        depart: Saves what is not and says how it ended; called in another thread while this one's is deaf.
        signals: Entered already, where they are to be heard before `listening`.
    """

    def __init__(self, console: Console, depart: Callable[[Ending], None], signals: Signals | None = None):
        self._console = console
        self._depart = depart
        self._signals = signals

    @property
    def ending(self) -> Ending | None:
        """The ending that a signal asks for, None where there was none."""
        number = None if self._signals is None else self._signals.received
        if number is None:
            return None
        return Ending.interrupted if number == signal.SIGINT else Ending.preempted

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listens, unless somebody does already."""
        if self._signals is not None:
            yield
            return
        with Signals() as self._signals:
            yield

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Says what compiles, and hears a signal meanwhile."""
        leaving = contextlib.nullcontext() if self._signals is None else self._signals.leaving_by(self._leave)
        with self._console.compiling(name), leaving:
            yield

    def _leave(self) -> None:
        """Departs and ends the process."""
        ending = self.ending or Ending.interrupted
        try:
            self._depart(ending)
            if self._signals is not None:
                self._signals.hand_on()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ending.exit_code)
