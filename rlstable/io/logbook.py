"""Logbook of a run: writes rows and events to the console, the record and the services."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rlstable.config.run import LoggingConfig
from rlstable.io.console import Console
from rlstable.io.files import one_line
from rlstable.io.jsonl import JsonLines, to_json
from rlstable.io.services import Metrics, TensorBoard, Wandb

_PATIENCE = 3  # failures in a row after which a service is dropped
_MOST_QUEUED = 1000  # rows; then training waits for the disk, so that the queue does not fill the memory


class Sink(Protocol):
    """A receiver of metrics and events; each method may raise."""

    def log(self, step: int, metrics: Metrics) -> None: ...

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class Logbook:
    """The console and all sinks of a run. A failing sink never stops training.

    The console prints at once, in the calling thread. One background thread writes the record (`metrics.jsonl` and
    `events.jsonl`), another one the services. Call `wait` when the record must be complete.

    | event | when |
    |---|---|
    | `sink_failed` | the first failure of a sink |
    | `sink_dropped` | three failures of a service in a row |
    | `sink_recovered` | the record works again after three or more failures; with the number of lines `lost` |
    | `wandb_failed` | Weights & Biases does not start; the run continues without it |
    """

    chosen: LoggingConfig
    settings: Mapping[str, Any]
    run_dir: Path
    console: Console
    more: Sequence[Sink] = ()

    def __post_init__(self) -> None:
        self._showing = threading.RLock()  # the background threads report failed sinks
        self._parts: list[_BackgroundSinks] = []  # the record, and the services; empty before `start`
        self.wandb_run_id: str | None = None  # to pass to `start` at a resume
        self.wandb_url: str | None = None  # of the run's page; None without one, as offline
        self._early: list[tuple[int, str, Mapping[str, Any]]] = []
        self._closed = False

    def start(self, wandb_run_id: str | None, resume_step: int | None) -> None:
        services: list[Sink] = [*self.more]
        chosen = self.chosen
        if chosen.tensorboard:
            services.append(TensorBoard(self.run_dir, resume_step))
        if chosen.wandb.mode != "disabled":
            self.wandb_run_id = wandb_run_id  # kept if the start fails
            try:
                wandb = Wandb(chosen.wandb, self.run_dir, self.settings, wandb_run_id)
                self.wandb_run_id, self.wandb_url = wandb.run_id, wandb.url
                services.append(wandb)
            except Exception as error:
                self.event(resume_step or 0, "wandb_failed", {"error": one_line(error)})
        # Last, because a sink that cannot be opened must not leave files that look like a run.
        self._parts = [_BackgroundSinks([JsonLines(self.run_dir, resume_step)], self._report)]
        self._parts.append(_BackgroundSinks(services, self._report))
        early, self._early = self._early, []
        for step, kind, fields in early:
            self.event(step, kind, fields)

    def log(self, step: int, metrics: Metrics) -> None:
        if not self._parts or self._closed:
            return
        with self._showing:
            self.console.log(step, metrics)
        for part in self._parts:
            part.log(step, dict(metrics))

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows one event and queues it for writing. Before `start`, the event is kept for later."""
        if not self._parts:
            self._early.append((step, kind, fields))
        elif not self._closed:
            self._report(None, step, kind, fields)

    def wait(self) -> None:
        for record in self._parts[:1]:
            record.wait()

    def close(self) -> None:
        """Writes all pending entries and closes the sinks; may be called again."""
        with contextlib.ExitStack() as closing:  # the console last, because it reports sinks that fail now
            closing.callback(self.console.close)
            closing.callback(setattr, self, "_closed", True)
            for part in self._parts:
                closing.callback(part.close)

    def _report(self, failed: Sink | None, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        try:  # a copy, because the caller may change the fields afterwards
            fields = {str(key): to_json(value) for key, value in fields.items()}
        except Exception as error:  # an event must not end a run
            fields = {"unreadable": f"{type(error).__name__}: {error}"}
        with self._showing:
            self.console.event(step, kind, fields)
        for part in self._parts:
            part.event(step, kind, fields, failed)


class _BackgroundSinks:
    """Writes sinks in a background thread, in order.

    A process that ends normally writes what is queued; a killed process does not.
    """

    def __init__(self, sinks: Sequence[Sink], report: Callable[[Sink | None, int, str, dict[str, Any]], None]):
        self._sinks = list(sinks)
        self._report = report
        self._failures: dict[Sink, int] = {}  # in a row
        self._reported: set[Sink] = set()
        self._thread = ThreadPoolExecutor(1, "writing")
        self._room = threading.Semaphore(_MOST_QUEUED)
        self._closed = False

    def log(self, step: int, row: Metrics) -> None:
        """Queues a row; waits while too many are queued."""

        def write() -> None:
            try:
                self._each(step, lambda sink: sink.log(step, row))
            finally:
                self._room.release()

        if not self._closed:
            self._room.acquire()
            self.submit(write)

    def event(self, step: int, kind: str, fields: Mapping[str, Any], skipped: Sink | None = None) -> None:
        self.submit(lambda: self._each(step, lambda sink: sink.event(step, kind, fields), skipped))

    def submit(self, call: Callable[[], None]) -> None:
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._thread.submit(call)

    def wait(self) -> None:
        if not self._closed:
            self._thread.submit(int).result()

    def close(self) -> None:
        if self._closed:
            return
        self.wait()  # failures among these calls are queued again
        self._closed = True
        self._thread.shutdown()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:
                text = f"rlstable: {type(sink).__name__} could not be closed: {one_line(error)}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _each(self, step: int, call: Callable[[Any], None], skipped: Sink | None = None) -> None:
        for sink in [sink for sink in self._sinks if sink is not skipped]:
            try:
                call(sink)
            except Exception as error:
                self._failed(sink, step, {"sink": type(sink).__name__, "error": one_line(error)})
            else:
                lost = self._failures.pop(sink, 0)
                if lost >= _PATIENCE:
                    self._reported.discard(sink)  # the next failure is reported again
                    self._report(None, step, "sink_recovered", {"sink": type(sink).__name__, "lost": lost})

    def _failed(self, sink: Sink, step: int, fields: dict[str, Any]) -> None:
        self._failures[sink] = self._failures.get(sink, 0) + 1
        if sink not in self._reported:
            self._reported.add(sink)
            self._report(sink, step, "sink_failed", fields)
        # The record is never dropped: a full disk may have space again.
        if self._failures[sink] >= _PATIENCE and not isinstance(sink, JsonLines):
            self._sinks.remove(sink)
            self._report(sink, step, "sink_dropped", fields)
            with contextlib.suppress(Exception):  # the failure has just been reported
                sink.close()
