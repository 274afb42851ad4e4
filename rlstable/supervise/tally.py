"""Counts over a whole run and the state of its signs of trouble, as plain JSON; saved with the run."""

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
    """Counts of a run, rolled back iterations included."""

    transitions: int = 0
    rejected: int = 0  # transitions that guards rejected
    latest: list[float] = dataclasses.field(default_factory=list)  # shares rejected in the latest 20 iterations
    ended: int = 0  # iterations in which training episodes ended
    finite: int = 0  # iterations in which the mean return of ended episodes was finite
    finite_loss_step: int = 0  # step of the last accepted update with a finite loss
    loss_is_finite: bool = True  # of the last accepted update
    evaluations: int = 0
    void: int = 0  # evaluations without a finite return
    trips: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # by guard and cause
    # By limiter, the sum of its activity and the number of iterations that reported it.
    limiters: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # Minibatches rejected in iterations without an accepted update, by guard, `limiters/kl` or `SAMPLES`.
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
        """Counts an iteration, whose state is `kept` unless a state guard rejects it; `step` includes its steps.

        `trips` has only guards that tripped, `update_guards` the names of those that reject updates.
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
    """State of one sign; the steps and the count are those of its logged episodes of trouble."""

    recent: list[float | None] = dataclasses.field(default_factory=list)  # window of rows: number of a hit, or None
    count: int = 0
    first_step: int = 0
    last_step: int = 0
    text: str = ""
    recovered_step: int = 0  # 0 before the end

    @property
    def lasts(self) -> bool:
        """Whether an episode was logged that has not ended."""
        return self.count > 0 and not self.recovered_step

    def log(self, step: int, text: str) -> None:
        """Records that an episode of trouble is logged."""
        self.count += 1
        self.first_step = self.first_step if self.count > 1 else step
        self.last_step, self.text, self.recovered_step = step, text, 0


@dataclasses.dataclass
class SignState:
    """State of all signs; None is unknown."""

    records: dict[str, SignRecord] = dataclasses.field(default_factory=dict)  # only signs with a hit
    first_return: float | None = None  # lowest evaluation until the best one
    last_return: float | None = None  # of the latest evaluation
    best_return: float | None = None  # that two evaluations in a row reached; a single one may be lucky
    episodes: int = 0  # training episodes that had ended by the latest iteration
    steps_per_episode: float | None = None  # of the latest iteration
    training_return: float | None = None  # mean over recent iterations
    training_variance: float = 0.0  # of the mean return of an iteration
    training_length: float = 0.0  # of the episodes of the latest iteration
    longest: float = 0.0  # greatest mean length of training episodes in an iteration
    lowest_return: float | None = None  # of iterations and evaluations
    greatest_return: float | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> SignState:
        records = {name: SignRecord(**record) for name, record in saved.get("records", {}).items()}
        return cls(**saved | {"records": records})

    def log(self, name: str, step: int, text: str) -> None:
        """Records a sign that does not come from metrics."""
        self.records.setdefault(name, SignRecord()).log(step, text)

    def add_training(self, mean_return: float, length: float) -> None:
        difference = mean_return - (mean_return if self.training_return is None else self.training_return)
        self.training_return = mean_return - (1.0 - _RATE) * difference
        self.training_variance = (1.0 - _RATE) * (self.training_variance + _RATE * difference**2)
        self.training_length = length
        self._extend_range(self.training_return)

    def add_evaluation(self, value: float) -> None:
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
