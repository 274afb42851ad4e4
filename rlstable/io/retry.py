"""Decides when to save: every n iterations, and earlier after a failed save."""

from __future__ import annotations


class Retry:
    """Schedule of saves, with exponential backoff after failures.

    A save is due every `every` iterations. After a failed save, the next one is due 1 iteration later, then 2, 4 and so
    on, at most `every`.

    Args:
        every: Iterations between saves, at least 1.
    """

    def __init__(self, every: int):
        self._every = every
        self._failures = 0
        self._next: int | None = None

    def due(self, iteration: int) -> bool:
        """Whether to save after this iteration."""
        return iteration % self._every == 0 or (self._next is not None and iteration >= self._next)

    def failed(self, iteration: int) -> None:
        """Records that the save of this iteration failed."""
        self._next = iteration + min(2 ** min(self._failures, 32), self._every)
        self._failures += 1

    def saved(self) -> int:
        """Records a successful save. Returns the number of failed saves before it."""
        failures, self._failures, self._next = self._failures, 0, None
        return failures
