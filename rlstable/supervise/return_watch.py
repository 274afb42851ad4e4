"""Return watch: a sequential test of whether the return has fallen credibly below the best level reached.

A look is one observed return: the mean over finished training episodes, or a scheduled evaluation. A level is the
trimmed mean of the latest looks; each kind of look has its own test and level.

The test is a CUSUM e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). For normal looks with known noise and
their mean at the bound, one step of the test has an expectation of at most 1. The average number of looks until a false
suspicion is then at least `1 / FALSE_ALARM`. Because the noise is estimated, the test enlarges the estimate. The bound
is `_DEVIATIONS` of the noise below the best level, so healthy returns stay above the bound. One look adds at most a
quarter of the evidence for a suspicion, so a single bad evaluation causes none.

The noise needs a dozen looks. Until it is known, two evaluations in a row that are lower than the best one by more than
the tolerance, as a share of the gain and of the best return, are a suspicion as well.

A suspicion only causes a comparison (`is_worse`) of the policy with the best policy in the same fresh episodes.
Exploration noise, or a task that becomes harder, affects both policies and causes no collapse. All decisions depend on
looks, never on the clock, so a resumed run makes the same decisions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np

FALSE_ALARM = 1e-4  # per look; the average number of looks until a false suspicion is at least its inverse
SUSPICION = math.log(1.0 / FALSE_ALARM)
_MOST = SUSPICION / 4.0  # evidence that a single look adds at most
_RECENT = 5  # looks per level
_WINDOW = 60  # looks for the estimate of the noise
_FEWEST_STEPS = 6  # differences needed for an estimate of the noise
_CAUTION = 8.0  # the noise from n differences is multiplied by 1 + _CAUTION / n, a 99 % upper bound
_NOISE_SHARE = 0.02  # smallest assumed noise, as a share of the gain
_DEVIATIONS = 3.0  # standard deviations of the noise; a smaller fall is never a suspicion
_AT_THE_END = 0.2  # share of the gain that the last state of a run may have lost
_FALSE_CONFIRMATION = 1e-3  # probability that a paired comparison confirms a collapse of equally good policies
_FALSE_HANDOVER = 0.05  # the same at the end of a run, where a mistake only replaces a policy by an equally good one
_FEWEST_PAIRS = 4
_ABORTED = 0.1  # share of episodes; a policy that finishes fewer has collapsed
_FEWEST_EVALUATIONS = 3  # evaluations needed for a comparison with the last evaluation of a run
_FALLEN = 2  # low evaluations in a row that are a suspicion while the noise is unknown


@dataclasses.dataclass
class Track:
    """State of the test for one kind of look, as plain JSON; None is unknown."""

    recent: list[float] = dataclasses.field(default_factory=list)  # latest looks, the newest last
    earlier: list[float] = dataclasses.field(default_factory=list)  # looks before, for the estimate of the noise
    start: float | None = None  # first look
    best: float | None = None  # greatest level
    lowest: float | None = None  # lowest level
    lower_bound: float | None = None  # greatest of the levels minus `_DEVIATIONS` of the noise
    evidence: float = 0.0  # logarithm of the test's e-value, never below 0

    def look(self, value: float, tolerance: float) -> bool:
        """Records a mean return; returns whether the look and the level are the best so far."""
        if self.start is None:
            self.start = value
        if self.best is not None and self.lower_bound is not None:
            bound = min(self.best - tolerance * self.gain, self.lower_bound)
            if self.evidence > 0.0 or value < bound:
                # Looks during a fall must not enlarge the noise, and quiet looks must not shrink it.
                noise = max(self.noise(self.earlier), (self.best - self.lower_bound) / _DEVIATIONS)
                # exp(z - 1/2) has an expectation of at most 1 for a normal look with its mean at or above the bound.
                self.evidence = max(0.0, self.evidence + min((bound - value) / noise - 0.5, _MOST))
        if len(self.recent) == _RECENT:
            self.earlier = [*self.earlier, self.recent[0]][-_WINDOW:]
        self.recent = [*self.recent, value][-_RECENT:]
        return len(self.recent) == _RECENT and self._is_best(value)

    def _is_best(self, value: float) -> bool:
        level, before = self.level, self.best
        self.lowest = level if self.lowest is None else min(self.lowest, level)
        is_best = before is None or level >= before
        if is_best:
            self.best = level
        if len(self.earlier) > _FEWEST_STEPS:
            bound = level - _DEVIATIONS * self.noise([*self.earlier, *self.recent])
            self.lower_bound = bound if self.lower_bound is None else max(self.lower_bound, bound)
        return is_best and (before is None or value >= before)

    @property
    def level(self) -> float:
        """Mean of the latest looks without the greatest and the least, so that no single look decides the level."""
        looks = sorted(self.recent)
        looks = looks[1:-1] if len(looks) > 2 else looks
        return math.fsum(looks) / len(looks)

    @property
    def gain(self) -> float:
        """Range of returns up to the best level, at least 0: `gained`."""
        return 0.0 if self.best is None else gained(self.best, self.start, self.lowest)

    @property
    def holds(self) -> bool:
        """Whether the level has hardly fallen below the best level; False if it is not known."""
        return (
            self.best is not None and len(self.recent) == _RECENT and self.level >= self.best - _AT_THE_END * self.gain
        )

    def lower(self) -> None:
        """Sets the best level to the present level, after a suspicion that was refuted."""
        self.best, self.lower_bound, self.evidence = self.level, None, 0.0

    def restart(self) -> None:
        """Drops the looks of a collapsed policy; the best level and the noise stay."""
        self.recent, self.evidence = [], 0.0

    def noise(self, looks: list[float]) -> float:
        """Standard deviation of a look, from differences (von Neumann 1941); the greatest of three estimates.

        Two estimates use falls only, because a learning curve rises, while half of the differences of noise are falls.
        Falls from the upper half of the gain are enough, because an untrained policy may return less evenly.
        The estimate from successive looks misses a drift, so another one uses looks further apart. The third uses the
        latest looks with their rises, because a sparse return may have risen once and not fallen yet.
        """
        middle = -math.inf if self.best is None else self.best - self.gain / 2.0
        latest = looks[-2 * _RECENT :]
        rises = math.fsum((b - a) ** 2 for a, b in itertools.pairwise(latest))
        noise = math.sqrt(rises / 2.0 / max(len(latest) - 1, 1))
        for lag in (1, _RECENT):
            pairs = [*zip(looks, looks[lag:], strict=False)]
            if len(pairs) >= _FEWEST_STEPS:
                upper = [pair for pair in pairs if pair[0] >= middle]
                noise = max(noise, min(_deviation(pairs), _deviation(upper)))
        return max(noise, _NOISE_SHARE * (self.gain or abs(self.best or 0.0)), 1e-12)


def _deviation(pairs: list[tuple[float, float]]) -> float:
    """Standard deviation of a look, from the falls of some pairs of looks; infinite if the pairs are too few."""
    if len(pairs) < _FEWEST_STEPS:
        return math.inf
    square = math.fsum((a - b) ** 2 for a, b in pairs if b < a) / len(pairs)
    return math.sqrt(square) * (1.0 + _CAUTION / len(pairs))


def gained(best: float, *lower: float | None) -> float:
    """Range of returns from the first known bound in `lower` that is below the best return; 0 without such a bound.

    A tolerance is a share of this range, never of the best return, which may be negative or close to 0.
    """
    return next((best - bound for bound in lower if bound is not None and bound < best), 0.0)


@dataclasses.dataclass
class WatchState:
    """State of the return watch, as plain JSON."""

    training: Track = dataclasses.field(default_factory=Track)
    evaluation: Track = dataclasses.field(default_factory=Track)
    total: float = 0.0  # returns of the episodes in the next look
    episodes: int = 0  # in the next look
    best_evaluation: float | None = None  # of the best state, measured again at a refuted suspicion
    fallen: int = 0  # low evaluations in a row while the noise is unknown
    collapses: int = 0  # confirmed

    @classmethod
    def of(cls, saved: dict[str, Any]) -> WatchState:
        tracks: dict[str, Any] = {name: Track(**saved[name]) for name in ("training", "evaluation") if name in saved}
        return cls(**saved | tracks)


@dataclasses.dataclass
class ReturnWatch:
    """Detects that a policy returns less than the best policy of the run."""

    tolerance: float  # share of the gain since the start that may be lost
    episodes: int  # of training, per look
    state: WatchState

    def train(self, mean_return: float, episodes: int) -> bool | None:
        """Records the training episodes of an iteration; their mean return is NaN without episodes.

        Returns whether the level is the best so far; None if the iteration completes no look. After an evaluation no
        level counts as the best: training may see another task, and evaluations compare states better.
        """
        state = self.state
        if episodes > 0 and math.isfinite(mean_return):
            state.total += mean_return * episodes
            state.episodes += episodes
        if state.episodes < self.episodes:
            return None
        value, state.total, state.episodes = state.total / state.episodes, 0.0, 0
        return state.training.look(value, self.tolerance) and state.best_evaluation is None

    def evaluate(self, mean_return: float | None) -> bool:
        """Records an evaluation, None if every episode was aborted; returns whether it is the greatest so far."""
        if mean_return is None or not math.isfinite(mean_return):
            return False
        state = self.state
        state.evaluation.look(mean_return, self.tolerance)
        if state.best_evaluation is not None and mean_return <= state.best_evaluation:
            lower = state.evaluation.start, state.training.start, *sorted(state.evaluation.recent)
            gain = max(gained(state.best_evaluation, *lower), abs(state.best_evaluation))
            is_low = mean_return < state.best_evaluation - self.tolerance * gain
            state.fallen = state.fallen + 1 if is_low and state.evaluation.lower_bound is None else 0
            return False
        state.best_evaluation, state.fallen = mean_return, 0
        return True

    @property
    def suspects(self) -> bool:
        """Whether to compare the policy with the best policy."""
        state = self.state
        return state.fallen >= _FALLEN or max(state.training.evidence, state.evaluation.evidence) >= SUSPICION

    def ends_below(self, last: float | None) -> bool:
        """Whether the last evaluation of a run is so low that the policy must be compared with the best policy.

        With few evaluations the reference is the level of training, which exploration can only lower.
        """
        state = self.state
        track = state.evaluation if self._evaluated_often else state.training
        best = state.best_evaluation if self._evaluated_often else track.best
        if best is None or track.start is None:
            return False
        if last is None:
            return True
        gain = gained(best, track.start, *sorted(track.recent))
        return last < best - (min(self.tolerance, _AT_THE_END) * gain or _NOISE_SHARE * abs(best))

    @property
    def _evaluated_often(self) -> bool:
        """Whether there are enough evaluations to know their range."""
        evaluation = self.state.evaluation
        return len(evaluation.earlier) + len(evaluation.recent) >= _FEWEST_EVALUATIONS

    def is_worse(self, best: np.ndarray, now: np.ndarray, at_the_end: bool = False) -> bool | None:
        """Whether a policy returns credibly less than the best policy, by more than the tolerance.

        The returns, `[episodes]`, are of episodes from the same first states, NaN for an aborted one. The tolerance is
        smaller `at_the_end` of a run. Returns None if the episodes are too few or too different.
        """
        # Episodes that only one policy aborts do not count, unless the present policy aborts nearly all episodes.
        both = np.isfinite(best) & np.isfinite(now)
        if int(np.isfinite(best).sum()) >= _FEWEST_PAIRS and np.isfinite(now).mean() < _ABORTED:
            return True
        if int(both.sum()) < _FEWEST_PAIRS:
            return None
        training, evaluation = self.state.training, self.state.evaluation
        # Training may see another task, so the range of evaluations counts where mistakes cost nothing.
        lower = [evaluation.start, evaluation.lowest] if at_the_end and self._evaluated_often else []
        level, fall = float(best[both].mean()), float((best[both] - now[both]).mean())
        gain = gained(level, *lower, training.start, evaluation.start, training.lowest, evaluation.lowest)
        share = min(self.tolerance, _AT_THE_END) if at_the_end else self.tolerance
        least = share * gain or (share if training.start is None else _NOISE_SHARE) * abs(level)
        if fall <= least:
            return False
        return True if self._falls(best, now, _FALSE_HANDOVER if at_the_end else _FALSE_CONFIRMATION) else None

    def _falls(self, best: np.ndarray, now: np.ndarray, mistake: float = _FALSE_CONFIRMATION) -> bool:
        """Whether the paired difference is credibly above 0, by Student's t test with error probability `mistake`."""
        from scipy.special import stdtrit  # slow to import, and only a suspicion needs it

        lost = (best - now)[np.isfinite(best) & np.isfinite(now)]
        if lost.size < _FEWEST_PAIRS:
            return False
        error = float(lost.std(ddof=1)) / math.sqrt(lost.size)
        return float(lost.mean()) > float(stdtrit(lost.size - 1, 1.0 - mistake)) * error

    def confirm(self) -> None:
        state = self.state
        state.collapses += 1
        state.total, state.episodes = 0.0, 0
        state.training.restart()
        state.evaluation.restart()
        self.reset_test()

    def refute(self, best: np.ndarray, now: np.ndarray) -> None:
        """Records a refuted suspicion: the policy is nearly as good as the best policy, so the level is lowered.

        If the policy is credibly worse within the tolerance, the level stays; small falls must not add up.
        """
        self.reset_test()
        if self._falls(best, now):
            return
        self.state.best_evaluation = float(np.nanmean(best)) if np.isfinite(best).any() else None
        for track in (self.state.training, self.state.evaluation):
            if track.recent:
                track.lower()

    def reset_test(self) -> None:
        """Restarts the test at the same level, after a comparison."""
        self.state.training.evidence = self.state.evaluation.evidence = 0.0
        self.state.fallen = 0
