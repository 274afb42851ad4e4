"""Logbook of a run: all outputs of rows and events, opened once the resumed step is known."""

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

Tell = Callable[[int, str, Mapping[str, Any]], bool]


class Logbook:
    """The sinks of a configuration behind one door.

    The console shows a thing when it is told, in the order of all that people see. The record, which are the files
    that a run goes on with, and services are written by threads beside the computing, a thread each: `wait` where the
    record has to be complete, however slow a service is.

    Args:
        config: Which sinks there are.
        run_dir: The run folder.
        console: Where people look; it works before `start`, the files do not.
        more: Other services.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console, more: Sequence[Sink] = ()):
        self._config = config
        self._run_dir = run_dir
        self._console = console
        self._showing = threading.RLock()  # the writing threads report what breaks
        self._shown = Sinks([console], tell=self._write)
        self._more = more
        self._record: _Written | None = None
        self._services: _Written | None = None
        self._lines: JsonLines | None = None
        self._tensorboard: TensorBoard | None = None
        self._wandb: Wandb | None = None
        self._early: list[tuple[int, str, Mapping[str, Any]]] = []

    @property
    def wandb_run_id(self) -> str | None:
        """The wandb run to continue after a resume."""
        return None if self._wandb is None else self._wandb.run_id

    def start(self, wandb_run_id: str | None, resume_step: int | None) -> None:
        """Opens the files.

        Args:
            wandb_run_id: The wandb run to continue, if any.
            resume_step: The step the run resumes from; rows after it are dropped, since they come again.
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
        # Last, since a sink that cannot be opened must not leave files that look like a run.
        self._lines = record = JsonLines(self._run_dir, resume_step)
        self._services = _Written(Sinks(services, tell=self._tell_others(lambda: self._services)), first)
        self._record = _Written(Sinks([record], tell=self._tell_others(lambda: self._record)), first)
        early, self._early = self._early, []
        for step, kind, fields in early:
            self.event(step, kind, fields)

    def log(self, step: int, metrics: Metrics) -> None:
        """Shows one row, and has it written."""
        if self._record is not None and self._services is not None:
            with self._showing:
                self._shown.log(step, metrics)
            row = dict(metrics)
            self._record.log(step, row)
            self._services.log(step, row)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows one event, and has it written; kept until `start` if that has not been."""
        if self._record is None:
            self._early.append((step, kind, fields))
        else:
            self._show(step, kind, fields)
            self._write(step, kind, fields)

    def wait(self) -> None:
        """Returns when the record is complete."""
        if self._record is not None:
            self._record.wait()

    @property
    def in_place(self) -> bool:
        """Whether the record is still written to the files of the run folder; True before `start`."""
        return self._lines is None or self._lines.in_place

    @property
    def foreign(self) -> bool:
        """Whether another run has written a record of the same name in the run folder."""
        return self._lines is not None and self._lines.foreign

    def restore(self) -> None:
        """Writes a lost record again into the run folder, with all its lines, and appends to it.

        TensorBoard begins a new file. Weights & Biases keeps writing to its own.

        Raises:
            OSError: It cannot be written.
        """
        if self._record is not None and self._services is not None and self._lines is not None:
            self._record.call(self._lines.restore)
            if self._tensorboard is not None:
                self._services.call(self._tensorboard.restore)

    def close(self) -> None:
        """Writes what is left and closes what was opened; may be called again."""
        with contextlib.ExitStack() as closing:  # in the end the console, which hears of what cannot be closed
            closing.callback(self._shown.close)
            for part in (self._record, self._services):
                if part is not None:
                    closing.callback(part.close)

    def _show(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        with self._showing:
            return self._shown.event(step, kind, fields)

    def _write(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        return any([part is not None and part.event(step, kind, fields) for part in (self._record, self._services)])

    def _tell_others(self, broken: Callable[[], _Written | None]) -> Tell:
        """Tells of what breaks in one part where people look, and in the other part."""

        def tell(step: int, kind: str, fields: Mapping[str, Any]) -> bool:
            for part in (self._record, self._services):
                if part is not None and part is not broken():
                    part.event(step, kind, fields)
            return self._show(step, kind, fields)

        return tell


class _Written:
    """Sinks that a thread of their own writes.

    Attributes:
        step: That of what is being written.

    Args:
        sinks: What is written.
        step: That of what comes first.
    """

    def __init__(self, sinks: Sinks, step: int):
        self._sinks = sinks
        self._writer = Writer()
        self._closed = False
        self.step = step

    def log(self, step: int, row: Metrics) -> None:
        if not self._closed:
            self._writer.ahead(self._log, step, row)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> bool:
        """Whether it is going to be written."""
        if self._closed:
            return False
        # A copy: the caller may change the fields afterwards.
        self._writer.soon(self._event, step, kind, _as_it_is(fields))
        return True

    def wait(self) -> None:
        if not self._closed:
            self._writer.wait()

    def call(self, call: Callable[[], None]) -> None:
        """Makes a call between two writes and waits for it; what it raises is raised here."""
        if not self._closed:
            self._writer.now(call)

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


def _as_it_is(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """A copy, of what can be read: an event must not end a run."""
    try:
        return {str(key): to_json(value) for key, value in fields.items()}
    except Exception as error:
        return {"unreadable": f"{type(error).__name__}: {error}"}
