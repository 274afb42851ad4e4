"""Logbook of a run: writes rows and events to all outputs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.config import Config
from rlstable.io.console import Console
from rlstable.io.jsonl import to_json
from rlstable.io.sinks import JsonLines, Metrics, Sink, Sinks, TensorBoard, Wandb
from rlstable.io.writer import Writer

Notify = Callable[[int, str, Mapping[str, Any]], bool]


class Logbook:
    """All sinks of a run behind one interface.

    The console prints at once, in the calling thread. One background thread writes the record (`metrics.jsonl` and
    `events.jsonl`), another one the services (TensorBoard, Weights & Biases). Call `wait` when the record must be
    complete; it does not wait for services.

    Args:
        config: Selects the sinks.
        run_dir: The run folder.
        console: The console; it works before `start`, the files do not.
        more: Additional services.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console, more: Sequence[Sink] = ()):
        self._config = config
        self._run_dir = run_dir
        self._console = console
        self._showing = threading.RLock()  # the writing threads report failed sinks
        self._shown = Sinks([console], notify=self._write)
        self._more = more
        self._record: _BackgroundSinks | None = None
        self._services: _BackgroundSinks | None = None
        self._lines: JsonLines | None = None
        self._tensorboard: TensorBoard | None = None
        self._wandb: Wandb | None = None
        self._early: list[tuple[int, str, Mapping[str, Any]]] = []

    @property
    def wandb_run_id(self) -> str | None:
        """The wandb run to continue after a resume."""
        return None if self._wandb is None else self._wandb.run_id

    @property
    def wandb_url(self) -> str | None:
        """The page of the wandb run; None without one, as offline."""
        return None if self._wandb is None else self._wandb.url

    def start(self, wandb_run_id: str | None, resume_step: int | None) -> None:
        """Opens the files.

        Args:
            wandb_run_id: The wandb run to continue, if any.
            resume_step: Step from which the run resumes; later rows are dropped, because training writes them again.
        """
        services: list[Sink] = [*self._more]
        chosen = self._config.logging
        first = resume_step or 0
        if chosen.tensorboard:
            self._tensorboard = TensorBoard(self._run_dir, resume_step)
            services.append(self._tensorboard)
        if chosen.wandb.mode != "disabled":

            def report(kind: str, fields: Mapping[str, Any]) -> None:
                self.event(first if self._services is None else self._services.step, kind, fields)

            run_config = self._config.model_dump(mode="json")
            self._wandb = Wandb(chosen.wandb, self._run_dir, run_config, wandb_run_id, on_event=report)
            services.append(self._wandb)
        # Last, because a sink that cannot be opened must not leave files that look like a run.
        self._lines = record = JsonLines(self._run_dir, resume_step)
        self._services = _BackgroundSinks(Sinks(services, notify=self._notify_others(lambda: self._services)), first)
        self._record = _BackgroundSinks(Sinks([record], notify=self._notify_others(lambda: self._record)), first)
        early, self._early = self._early, []
        for step, kind, fields in early:
            self.event(step, kind, fields)

    def log(self, step: int, metrics: Metrics) -> None:
        """Shows one row and queues it for writing."""
        if self._record is not None and self._services is not None:
            with self._showing:
                self._shown.log(step, metrics)
            row = dict(metrics)
            self._record.log(step, row)
            self._services.log(step, row)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows one event and queues it for writing. Before `start`, the event is kept for later."""
        if self._record is None:
            self._early.append((step, kind, fields))
        else:
            self._show(step, kind, fields)
            self._write(step, kind, fields)

    def run_after_rows(self, call: Callable[[], None]) -> None:
        """Runs a short call that does not raise in the thread of the record; `wait` waits for it."""
        if self._record is not None:
            self._record.submit(call)

    @property
    def shows_films(self) -> bool:
        """Whether a service shows films."""
        return self._tensorboard is not None or self._wandb is not None

    def film(self, step: int, draw: Callable[[], Path | None]) -> None:
        """Draws a film in the thread of the services, and passes it to those that show films.

        Args:
            step: Step of the film.
            draw: Draws the film without raising; returns its GIF file, or None without a film.
        """
        if self._services is not None:
            self._services.film(step, draw)

    def wait(self) -> None:
        """Waits until the record is complete."""
        if self._record is not None:
            self._record.wait()

    @property
    def in_place(self) -> bool:
        """Whether the run folder was not deleted, moved or replaced since `start`; True before `start`."""
        return self._lines is None or self._lines.in_place

    def close(self) -> None:
        """Writes all pending entries and closes the sinks; may be called again."""
        with contextlib.ExitStack() as closing:  # the console last, because it reports sinks that cannot be closed
            closing.callback(self._shown.close)
            for part in (self._record, self._services):
                if part is not None:
                    closing.callback(part.close)

    def _show(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        with self._showing:
            return self._shown.event(step, kind, fields)

    def _write(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        return any([part is not None and part.event(step, kind, fields) for part in (self._record, self._services)])

    def _notify_others(self, failed: Callable[[], _BackgroundSinks | None]) -> Notify:
        """Returns a function that sends events about a failed sink to the console and to the other sinks."""

        def notify(step: int, kind: str, fields: Mapping[str, Any]) -> bool:
            for part in (self._record, self._services):
                if part is not None and part is not failed():
                    part.event(step, kind, fields)
            return self._show(step, kind, fields)

        return notify


class _BackgroundSinks:
    """Writes sinks in a background thread.

    Attributes:
        step: Step of the entry that is being written.

    Args:
        sinks: The sinks.
        step: First step.
    """

    def __init__(self, sinks: Sinks, step: int):
        self._sinks = sinks
        self._writer = Writer()
        self._closed = False
        self.step = step

    def log(self, step: int, row: Metrics) -> None:
        if not self._closed:
            self._writer.submit_bounded(self._log, step, row)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        """Queues an event. Returns False after `close`."""
        if self._closed:
            return False
        # A copy, because the caller may change the fields afterwards.
        self._writer.submit(self._event, step, kind, _copy(fields))
        return True

    def film(self, step: int, draw: Callable[[], Path | None]) -> None:
        def show() -> None:
            if (path := draw()) is not None:
                self._sinks.film(step, path)

        self.submit(show)

    def submit(self, call: Callable[[], None]) -> None:
        """Runs a call in the writing thread."""
        if not self._closed:
            self._writer.submit(call)

    def wait(self) -> None:
        if not self._closed:
            self._writer.wait()

    def close(self) -> None:
        self._closed = True
        try:
            self._writer.close()
        finally:
            self._sinks.close()

    def _log(self, step: int, row: Metrics) -> None:
        self.step = step
        self._sinks.log(step, row)

    def _event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self.step = step
        self._sinks.event(step, kind, fields)


def _copy(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy as JSON data. Fields that cannot be read become one error field, because an event must not end a run."""
    try:
        return {str(key): to_json(value) for key, value in fields.items()}
    except Exception as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}
