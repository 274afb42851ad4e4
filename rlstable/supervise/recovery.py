"""Going back and trying again: which remedy is next, when it is taken back, and when to give up.

All of it depends on iterations and on causes, never on the clock, so that a resumed run decides as the run would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from rlstable.config.supervise import RecoveryConfig, Remedy


@dataclasses.dataclass
class Attempts:
    """Memory of recovery as plain JSON, saved with the run.

    Attributes:
        count: Rollbacks of the whole run.
        lost_steps: Environment steps that were trained and given up.
        lost_iterations: Likewise.
        recent: When the attempts of the window were made, each `{"at", "cause", "remedy"}`; `at` counts iterations,
            those given up included.
        position: How many remedies of the list have been used since the last healthy stretch.
        collapse_position: Likewise of the list for collapses of the return.
        applied: Remedies in effect, as written in the configuration, the latest last.
        healthy: Healthy iterations in a row since the last attempt or relaxation.
        stretch: As many of them as it takes to take a remedy back; grows when that was a mistake.
        relaxed: The remedy that was taken back last, until it has proved superfluous.
    """

    count: int = 0
    lost_steps: int = 0
    lost_iterations: int = 0
    recent: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    position: int = 0
    applied: list[Any] = dataclasses.field(default_factory=list)
    healthy: int = 0
    stretch: int = 0
    relaxed: Any = None
    collapse_position: int = 0


class Plan(NamedTuple):
    """The plan for the next attempt.

    Attributes:
        number: Of the attempt in the whole run, from 1.
        remedy: What it changes.
    """

    number: int
    remedy: Remedy


@dataclasses.dataclass
class Recovery:
    """Decides what to do of a cause that guards hand over.

    Attributes:
        config: The list of remedies and how often they may be tried.
        attempts: What has been tried.
    """

    config: RecoveryConfig
    attempts: Attempts

    def __post_init__(self) -> None:
        self.attempts.stretch = self.attempts.stretch or self.config.relax_after

    def plan(
        self, cause: str, at: int, applicable: Callable[[Remedy], bool] = lambda _: True, collapse: bool = False
    ) -> Plan | None:
        """The next attempt, which is counted by this; None where there have been too many.

        Args:
            cause: Why the last one failed.
            at: Iterations so far, those given up included.
            applicable: Whether a remedy can change anything now; one that cannot is passed over.
            collapse: Whether the return collapsed: the remedy is then one of `collapse_remedies`.
        """
        own, config = self.attempts, self.config
        own.recent = [attempt for attempt in own.recent if at - attempt["at"] < config.window]
        if not config.enabled or len(own.recent) >= config.attempts:
            return None
        remedy = self._next(applicable, collapse)
        if remedy is None:
            return None
        own.count += 1
        own.healthy = 0
        if own.relaxed is not None:
            # It was taken back too early: wait longer the next time, so that this does not go to and fro for ever.
            own.stretch *= 2
            own.relaxed = None
        written = remedy.model_dump(mode="json")
        own.recent.append({"at": at, "cause": cause, "remedy": written})
        if remedy.lasts:
            own.applied.append(written)
        return Plan(own.count, remedy)

    def healthy(self, good: bool) -> Remedy | None:
        """Counts an iteration; after a long healthy stretch, the remedy to take back."""
        own = self.attempts
        own.healthy = own.healthy + 1 if good else 0
        if own.healthy < own.stretch:
            return None
        own.healthy = 0
        own.relaxed = None
        own.position = own.collapse_position = 0
        if not own.applied:
            return None
        own.relaxed = own.applied.pop()
        return Remedy.model_validate(own.relaxed)

    def _next(self, applicable: Callable[[Remedy], bool], collapse: bool) -> Remedy | None:
        """The remedy taken back last if it is one of this list, else the next of the list, again and again."""
        own = self.attempts
        remedies = self.config.collapse_remedies if collapse else self.config.remedies
        place = "collapse_position" if collapse else "position"
        if own.relaxed is not None:
            again = Remedy.model_validate(own.relaxed)
            if again in remedies and applicable(again):
                return again
        for _ in remedies:
            remedy = remedies[getattr(own, place) % len(remedies)]
            setattr(own, place, getattr(own, place) + 1)
            if applicable(remedy):
                return remedy
        return None
