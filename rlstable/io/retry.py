"""When to save: at set times, and after a failure sooner."""

from __future__ import annotations


class Retry:
    """Counts iterations between saves.

    Saves are due at every `every`-th iteration. After one that failed the next is due 1 iteration later, then 2, 4 and
    so on, never more than `every`: a disk that has room again is soon used, one that stays full costs little.

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
        """The save of this iteration failed."""
        self._next = iteration + min(2 ** min(self._failures, 32), self._every)
        self._failures += 1

    def saved(self) -> int:
        """A save succeeded; says how many in a row had failed before it."""
        failures, self._failures, self._next = self._failures, 0, None
        return failures
