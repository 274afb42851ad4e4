"""Stop requests (signals and the wall-clock limit), including while XLA is compiling."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

from rlstable.device import hosts
from rlstable.io.console import Console
from rlstable.supervise.signals import Signals
from rlstable.supervise.stop_reasons import StopReason

# Requests in the order in which several processes agree on one.
_REQUESTS = (None, StopReason.time_limit, StopReason.interrupted, StopReason.preempted)


@dataclasses.dataclass(eq=False)
class StopRequest:
    """Stop requests: signals and the wall-clock limit, also while XLA compiles.

    `save_and_end` returns the final stop reason, and `last_save` describes the last checkpoint for a user who may send
    a second signal; another thread calls both. `signals` are caught already. An iteration that would end later than
    `limit` seconds from now is not started.
    """

    console: Console
    save_and_end: Callable[[StopReason], StopReason]
    last_save: Callable[[], str]
    signals: Signals | None = None
    limit: float | None = None
    _started: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def stop_reason(self) -> StopReason | None:
        """The stop reason of the first signal; None without a signal."""
        number = self.received
        if number is None:
            return None
        return StopReason.interrupted if number == signal.SIGINT else StopReason.preempted

    @property
    def received(self) -> int | None:
        """The number of the first signal; None without one."""
        return None if self.signals is None else self.signals.received

    def agreed(self, next_seconds: float, saves: bool = False) -> tuple[StopReason | None, bool]:
        """The stop reason that all processes agree on after an iteration, and whether to save; all must call together.

        `next_seconds` is the expected duration of the next iteration, `saves` whether this process asks for a
        checkpoint. A run that stops saves in any case.
        """
        request, save = divmod(hosts.largest(2 * _REQUESTS.index(self.requested(next_seconds)) + saves), 2)
        return _REQUESTS[request], bool(save)

    def requested(self, next_seconds: float) -> StopReason | None:
        """The stop reason that a signal or the clock of this process requests before an iteration of `next_seconds`."""
        by_signal = self.stop_reason
        if by_signal is not None or self.limit is None:
            return by_signal
        return StopReason.time_limit if time.monotonic() - self._started + next_seconds > self.limit else None

    def requested_since(self, next_seconds: float) -> StopReason | None:
        """As `requested`, after the processes have agreed: several of them wait for the next time that they agree."""
        return self.requested(next_seconds) if hosts.count() == 1 else None

    @contextlib.contextmanager
    def catching_signals(self) -> Iterator[None]:
        """Catches signals, unless the caller catches them already."""
        with contextlib.ExitStack() as stack:
            if self.signals is None:
                self.signals = stack.enter_context(Signals())
            self.signals.announce = self._announce
            yield

    @contextlib.contextmanager
    def compiling(self, name: str) -> Iterator[None]:
        """Shows the name of the program that compiles, and reacts to signals meanwhile.

        Several processes compile to the end, because they can only save a state together.
        """
        handler: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.signals is not None and hosts.count() == 1:
            handler = self.signals.exit_handler(self._exit)
        with self.console.compiling(name), handler:
            yield

    def _announce(self, number: int) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        at_once = " at once," if self.signals is not None and self.signals.owns_process else ""
        again = f"a second signal stops it{at_once} without saving ({self.last_save()})"
        self.console.message(f"{name}: the run saves and stops; {again}")

    def _exit(self) -> None:
        """Saves the run and ends the process."""
        stop_reason = self.stop_reason or StopReason.interrupted
        try:
            stop_reason = self.save_and_end(stop_reason)
            if self.signals is not None:
                self.signals.call_previous_handler()  # submitit queues the job again
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop_reason.exit_code)
