"""All places where a run writes its numbers and events, opened once it is known where it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.config import Config
from rlstable.io.console import Console
from rlstable.io.sinks import JsonLines, Metrics, Sink, Sinks, TensorBoard, Wandb


class Logbook:
    """The sinks of a configuration behind one door.

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
        self._more = more
        self._sinks: Sinks | None = None
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
        sinks: list[Sink] = [self._console, *self._more]
        chosen = self._config.sinks
        self._step = resume_step or 0
        if chosen.tensorboard:
            sinks.append(TensorBoard(self._run_dir, resume_step))
        if chosen.wandb.mode != "disabled":
            run_config = self._config.model_dump(mode="json")
            self._wandb = Wandb(chosen.wandb, self._run_dir, run_config, wandb_run_id, on_event=self._report)
            sinks.append(self._wandb)
        # Last, since a sink that cannot be opened must not leave files that look like a run.
        self._sinks = Sinks([JsonLines(self._run_dir, resume_step), *sinks])
        for step, kind, fields in self._early:
            self._sinks.event(step, kind, fields)
        self._early = []

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes one row everywhere."""
        self._step = step
        if self._sinks is not None:
            self._sinks.log(step, metrics)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes one event everywhere; kept until `start` if that has not been."""
        if self._sinks is None:
            self._early.append((step, kind, fields))
        else:
            self._sinks.event(step, kind, fields)

    def close(self) -> None:
        """Closes what was opened."""
        self._closed = True
        if self._sinks is not None:
            self._sinks.close()
        else:
            self._console.close()

    def _report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """What a sink says of itself, when it is opened, at work or closed, after which only the console is left."""
        if self._closed:
            self._console.event(self._step, kind, fields)
        else:
            self.event(self._step, kind, fields)
