"""Listeners: whatever watches a run, such as pages and films. The loop speaks to them, and none of them answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlstable.io.console import Console
from rlstable.io.files import one_line

if TYPE_CHECKING:
    from rlstable.runner.seed import Seed

Row = dict[str, float | int | None]


class Listener:
    """Watches a run of one or several seeds. A subclass overrides the methods that it needs.

    The writing process calls them, between two iterations. One that takes long delays training.
    """

    def opened(self, run_dir: Path, seeds: Mapping[int, Seed]) -> None:
        """The run has a folder and its seeds, by seed; nothing is trained yet."""

    def row(self, seed: int, step: int, row: Row) -> None:
        """A seed has logged a row of metrics after `step` environment steps."""

    def evaluated(self, seed: Seed) -> None:
        """An iteration with an evaluation has ended. Not called if a signal or the clock ends the run after it."""

    def ended(self, folder: Path, fields: Mapping[str, Any]) -> None:
        """A folder is complete: of each seed, and then of a run of several. `fields` are those of `result.json`."""


class Listeners:
    """The listeners of a run. One that raises is named once, and hears nothing more; training continues."""

    def __init__(self, listeners: Iterable[Listener], console: Console, event: Callable[..., None]):
        self._listeners = list(listeners)
        self._console = console
        self._event = event  # logs an event of all seeds

    def opened(self, run_dir: Path, seeds: Mapping[int, Seed]) -> None:
        self._tell(lambda listener: listener.opened(run_dir, seeds))

    def row(self, seed: int, step: int, row: Row) -> None:
        self._tell(lambda listener: listener.row(seed, step, dict(row)))

    def evaluated(self, seed: Seed) -> None:
        self._tell(lambda listener: listener.evaluated(seed))

    def ended(self, folder: Path, fields: Mapping[str, Any]) -> None:
        with self._console.working("finishing the pages"):  # the log of the folder is closed
            self._tell(lambda listener: listener.ended(folder, fields), logs=False)

    def _tell(self, call: Callable[[Listener], None], logs: bool = True) -> None:
        for listener in [*self._listeners]:
            try:
                call(listener)
            except Exception as error:
                self._listeners.remove(listener)
                name, text = type(listener).__name__, one_line(error)
                if logs:
                    self._event("listener_failed", listener=name, error=text)
                else:
                    self._console.message(f"{name} failed: {text}")
