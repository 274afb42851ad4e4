"""Console of one seed among several: prints its events with the seed in front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlstable.io.console import Console

# Events that are the same for all seeds are shown once.
_SHARED = frozenset(
    {
        "backend_chosen", "backend_fallback", "compile_cache_unusable", "compiler_options_unknown",
        "configuration_changed", "disk_nearly_full", "environment_unwrapped", "environments_redrawn",
        "large_constants", "lock_unsupported", "memory_planned", "memory_tight",
        "precision_not_delivered",
        "versions_changed",
    }
)  # fmt: skip


class SeedConsole(Console):
    """Passes events of one seed to the console of all seeds, which shows their common progress.

    Args:
        console: Console of all seeds.
        seed: This seed.
        shown: Shared events that were already shown; all seeds use the same set.
    """

    def __init__(self, console: Console, seed: int, shown: set[str]):
        super().__init__("off", total_steps=1)
        self._console = console
        self._name = f"seed {seed}"
        self._shown = shown

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Shows nothing."""

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Prints the event with its seed; prints a shared event once, without a seed."""
        if kind in _SHARED:
            text = f"{step} {kind} {fields}"
            if text not in self._shown:
                self._shown.add(text)
                self._console.event(step, kind, fields)
        elif kind == "guard_tripped":
            # The console sums trips by guard, so the seed is part of the guard's name.
            self._console.event(step, kind, {**fields, "guard": f"{self._name}: {fields['guard']}"})
        else:
            self._console.event(step, kind, {"of": self._name, **fields})

    def message(self, text: str) -> None:
        """Prints a line."""
        self._console.message(f"{self._name}: {text}")

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        """Prints nothing; all seeds share one summary."""

    def close(self) -> None:
        """Does nothing; the display belongs to all seeds."""
