"""Counts over a whole run and the memory of its signs of trouble, as plain JSON; saved with the run."""

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
_RATE = 0.1  # weight of an iteration in the mean return of training
_LOGGED = ("count", "first_step", "last_step", "recovered_step", "text")  # fields of a logged sign


@dataclasses.dataclass
class Tally:
    """Counts of a run, rolled back iterations included.

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


@dataclasses.dataclass
class SignRecord:
    """Memory of one sign.

    Attributes:
        recent: Window of the latest rows, the newest last: the number of a hit, None for a row without a hit.
        lasts: Whether an episode of trouble was logged that has not ended.
        count: Number of logged episodes.
        first_step: Step of the first logged episode.
        last_step: Step of the last hit in a logged episode.
        text: Latest sentence.
        recovered_step: Step at which the latest logged episode ended; 0 before the end.
    """

    recent: list[float | None] = dataclasses.field(default_factory=list)
    lasts: bool = False
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    text: str = ""
    recovered_step: int = 0

    def log(self, step: int, text: str) -> None:
        """Records that an episode of trouble is logged."""
        self.count += 1
        self.first_step = self.first_step if self.count > 1 else step
        self.last_step, self.text, self.recovered_step = step, text, 0


@dataclasses.dataclass
class SignMemory:
    """Memory of all signs.

    Attributes:
        records: By name of the sign; only signs with a hit.
        first_return: Lowest evaluation until the best one; at first the first evaluation.
        last_return: Return of the latest evaluation.
        best_return: Greatest return that two consecutive evaluations reached; a single evaluation may be lucky.
        episodes: Training episodes that had ended by the latest iteration.
        steps_per_episode: Steps of the latest iteration by its ended episodes; None if no episode ended.
        training_return: Mean return of the episodes of recent iterations; None before any episode.
        training_variance: Variance of the mean return of an iteration.
        training_length: Length of the episodes of the latest iteration.
        lowest_return: Least mean return of an iteration or an evaluation; None before any.
        greatest_return: Greatest return, as `lowest_return`.
    """

    records: dict[str, SignRecord] = dataclasses.field(default_factory=dict)
    first_return: float | None = None
    last_return: float | None = None
    best_return: float | None = None
    episodes: int = 0
    steps_per_episode: float | None = None
    training_return: float | None = None
    training_variance: float = 0.0
    training_length: float = 0.0
    lowest_return: float | None = None
    greatest_return: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> SignMemory:
        """Reads the memory in a checkpoint."""
        records = {name: SignRecord(**record) for name, record in saved.get("records", {}).items()}
        return cls(**saved | {"records": records})

    def log(self, name: str, step: int, text: str) -> None:
        """Records a sign that does not come from metrics."""
        self.records.setdefault(name, SignRecord()).log(step, text)

    def add_training(self, mean_return: float, length: float) -> None:
        """Records the mean return and length of the episodes that ended in an iteration."""
        difference = mean_return - (mean_return if self.training_return is None else self.training_return)
        self.training_return = mean_return - (1.0 - _RATE) * difference
        self.training_variance = (1.0 - _RATE) * (self.training_variance + _RATE * difference**2)
        self.training_length = length
        self._extend_range(self.training_return)

    def add_evaluation(self, value: float) -> None:
        """Records the mean return of an evaluation."""
        if self.first_return is None:
            self.first_return = value
        if self.best_return is None or self.first_return >= self.best_return:
            self.first_return = min(self.first_return, value)
        if self.last_return is not None:
            level = min(self.last_return, value)
            self.best_return = level if self.best_return is None else max(self.best_return, level)
        self.last_return = value
        self._extend_range(value)

    def _extend_range(self, value: float) -> None:
        self.lowest_return = value if self.lowest_return is None else min(value, self.lowest_return)
        self.greatest_return = value if self.greatest_return is None else max(value, self.greatest_return)

    @property
    def logged(self) -> dict[str, dict[str, Any]]:
        """Count, steps, text and `lasts` of every logged sign, ordered by first step, for `result.json`."""
        logged = [(name, record) for name, record in self.records.items() if record.count]
        return {
            name: {key: getattr(record, key) for key in _LOGGED} | {"lasts": record.lasts}
            for name, record in sorted(logged, key=lambda pair: pair[1].first_step)
        }
