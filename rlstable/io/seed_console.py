"""Console lines of one seed among several: its events, with its number in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlstable.io.console import Console

# Events that all seeds share are shown once.
_ALIKE = frozenset(
    {
        "backend_chosen", "backend_fallback", "compile_cache_unusable", "configuration_changed", "disk_nearly_full",
        "environments_redrawn", "folder_not_remembered", "lock_unsupported", "memory_planned", "memory_tight",
        "precision_not_delivered", "versions_changed",
    }
)  # fmt: skip


class SeedConsole(Console):
    """Passes on new events; the fleet shows the progress of all seeds.

    Args:
        console: That of all seeds.
        seed: This one.
        told: What any of them has told of all; they share it.
    """

    def __init__(self, console: Console, seed: int, told: set[str]):
        super().__init__("off", total_steps=1)
        self._console = console
        self._name = f"seed {seed}"
        self._told_of_all = told

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Shows nothing."""

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Says which seed it happened to."""
        if kind in _ALIKE:
            text = f"{step} {kind} {fields}"
            if text not in self._told_of_all:
                self._told_of_all.add(text)
                self._console.event(step, kind, fields)
        elif kind == "guard_tripped":
            # Trips are added up by guard.
            self._console.event(step, kind, {**fields, "guard": f"{self._name}: {fields['guard']}"})
        else:
            self._console.event(step, kind, {"of": self._name, **fields})

    def message(self, text: str) -> None:
        """Prints a line."""
        self._console.message(f"{self._name}: {text}")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints nothing; there is one summary of all."""

    def close(self) -> None:
        """Leaves the display to the others."""
