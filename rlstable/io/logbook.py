"""All places where a run writes its numbers and events, opened once it is known where it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.config import Config
from rlstable.io.console import Console
from rlstable.io.jsonlines import to_json
from rlstable.io.sinks import JsonLines, Metrics, Sink, Sinks, TensorBoard, Wandb
from rlstable.io.writer import Writer


class Logbook:
    """The sinks of a configuration behind one door.

    The console shows a thing when it is told, in the order of all that people see. Files and services are written by
    a thread beside the computing; `wait` where they have to be complete.

    Args:
        config: Which sinks there are.
        run_dir: The run folder.
        console: Where people look; it works before `start`, the files do not.
        more: Other sinks.
    """

    def __init__(self, config: Config, run_dir: Path, console: Console, more: Sequence[Sink] = ()):
        self._config = config
        self._run_dir = run_dir
        self._console = console
        self._shown = Sinks([console], tell=self._write_event)
        self._more = more
        self._written: Sinks | None = None
        self._writer = Writer()
        self._wandb: Wandb | None = None
        self._early: list[tuple[int, str, Mapping[str, Any]]] = []
        self._step = 0
        self._closed = False

    @property
    def wandb_run_id(self) -> str | None:
        """The wandb run to go on with after a resume."""
        return None if self._wandb is None else self._wandb.run_id

    def start(self, wandb_run_id: str | None, resume_step: int | None) -> None:
        """Opens the files.

        Args:
            wandb_run_id: The wandb run to continue, if any.
            resume_step: The step the run goes on from; what was logged after it is dropped, it comes again.
        """
        sinks: list[Sink] = [*self._more]
        chosen = self._config.sinks
        self._step = resume_step or 0
        if chosen.tensorboard:
            sinks.append(TensorBoard(self._run_dir, resume_step))
        if chosen.wandb.mode != "disabled":
            run_config = self._config.model_dump(mode="json")
            self._wandb = Wandb(chosen.wandb, self._run_dir, run_config, wandb_run_id, on_event=self._report)
            sinks.append(self._wandb)
        # Last, since a sink that cannot be opened must not leave files that look like a run.
        self._written = Sinks([JsonLines(self._run_dir, resume_step), *sinks], tell=self._shown.event)
        early, self._early = self._early, []
        for step, kind, fields in early:
            self.event(step, kind, fields)

    def log(self, step: int, metrics: Metrics) -> None:
        """Shows one row, and has it written."""
        self._step = step
        if self._written is not None and not self._closed:
            self._shown.log(step, metrics)
            self._writer.ahead(self._written.log, step, dict(metrics))

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Shows one event, and has it written; kept until `start` if that has not been."""
        if self._written is None:
            self._early.append((step, kind, fields))
        else:
            self._shown.event(step, kind, fields)
            self._write_event(step, kind, fields)

    def wait(self) -> None:
        """Returns when all that was logged is written."""
        if not self._closed:
            self._writer.wait()

    def close(self) -> None:
        """Closes what was opened; may be called again."""
        self._closed = True
        self._writer.close()
        if self._written is not None:
            self._written.close()
        self._shown.close()

    def _write_event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        if self._written is not None and not self._closed:
            # As it is now: whoever told of it may go on working on what it consists of.
            self._writer.soon(self._written.event, step, kind, to_json(fields))

    def _report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """What wandb says of itself, when it is opened, or at work or closed in the thread that writes."""
        if self._written is None and not self._closed:
            self._early.append((self._step, kind, fields))
            return
        self._shown.event(self._step, kind, fields)
        if self._written is not None and not self._closed:
            self._written.event(self._step, kind, fields)
