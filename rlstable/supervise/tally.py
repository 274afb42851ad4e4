"""Counts over a whole run, for its warnings and for the advice on its stop reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

Values = Mapping[str, Any]
Trips = Mapping[str, Mapping[str, int]]

_LATEST = 20  # last iterations of a run
_KL = "limiters/kl"
SAMPLES = "no valid sample"  # in `Tally.lost`


@dataclasses.dataclass
class Tally:
    """Counts of a run, rolled back iterations included, as plain JSON; saved with the run.

    Attributes:
        transitions: Transitions collected.
        rejected: Transitions that guards rejected.
        latest: Share of rejected transitions in each of the latest 20 iterations, the newest last.
        ended: Iterations in which training episodes ended.
        finite: Iterations in which the mean return of ended episodes was finite.
        finite_loss_step: Step of the last accepted update with a finite loss; 0 without one.
        loss_is_finite: Whether the last accepted update had a finite loss.
        evaluations: Evaluations.
        void: Evaluations without a finite return.
        trips: Trips by guard and cause.
        limiters: By limiter, the sum of its activity and the number of iterations that reported it.
        lost: Minibatches rejected in iterations without an accepted update, by the cause: a guard's name,
            `limiters/kl` or `SAMPLES`.
    """

    transitions: int = 0
    rejected: int = 0
    latest: list[float] = dataclasses.field(default_factory=list)
    ended: int = 0
    finite: int = 0
    finite_loss_step: int = 0
    loss_is_finite: bool = True
    evaluations: int = 0
    void: int = 0
    trips: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    limiters: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    lost: dict[str, float] = dataclasses.field(default_factory=dict)

    def count(
        self,
        values: Values,
        trips: Trips,
        transitions: int,
        minibatches: int,
        update_guards: Collection[str],
        step: int,
        kept: bool = True,
    ) -> None:
        """Counts an iteration.

        Args:
            values: Metrics by name.
            trips: Trips by guard and cause; only guards that tripped.
            transitions: Collected transitions.
            minibatches: Attempted updates.
            update_guards: Names of the guards that reject updates.
            step: Environment steps trained, with this iteration.
            kept: Whether the state after the iteration is kept; a state guard may reject it.
        """
        learned = values["training/accepted_share"] > 0
        if learned and kept:
            self.loss_is_finite = math.isfinite(values.get("training/v_loss", 0.0))
            self.finite_loss_step = step if self.loss_is_finite else self.finite_loss_step
        share = 1.0 - float(values.get("training/valid_share", 1.0))
        self.transitions += transitions
        self.rejected += round(share * transitions)
        self.latest = [*self.latest, share][-_LATEST:]
        if not math.isnan(values.get("episode/length", math.nan)):
            self.ended += 1
            # Rewards of environments with a bad state may be finite.
            self.finite += self.loss_is_finite and math.isfinite(values.get("episode/sum_reward", math.nan))
        for guard, causes in trips.items():
            counts = self.trips.setdefault(guard, {})
            for cause, trips_of_cause in causes.items():
                counts[cause] = counts.get(cause, 0) + trips_of_cause
        for key, value in values.items():
            if key.startswith("limiters/") and math.isfinite(value):
                total, reports = self.limiters.get(key.removesuffix("/active"), (0.0, 0.0))
                self.limiters[key.removesuffix("/active")] = [total + float(value), reports + 1]
        if not learned:
            lost = {name: float(sum(trips[name].values())) for name in update_guards if name in trips}
            lost[_KL] = float(values.get(f"{_KL}/active", 0.0)) * minibatches
            lost[SAMPLES] = float(minibatches) if share >= 1.0 else 0.0
            for name, minibatches_lost in lost.items():
                if minibatches_lost > 0:
                    self.lost[name] = self.lost.get(name, 0.0) + minibatches_lost

    def count_evaluation(self, mean_return: float | None) -> None:
        """Counts an evaluation; `mean_return` is None if every episode was aborted."""
        self.evaluations += 1
        self.void += mean_return is None or not math.isfinite(mean_return)

    @property
    def tripped(self) -> dict[str, int]:
        """Trips by guard, the most frequent first."""
        counts = {guard: sum(causes.values()) for guard, causes in self.trips.items()}
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))

    def main_cause(self, guard: str) -> str:
        """The most frequent cause of a guard that tripped."""
        causes = self.trips[guard]
        return max(causes, key=lambda cause: causes[cause])
