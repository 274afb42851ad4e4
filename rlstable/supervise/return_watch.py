"""Return watch: a sequential test of whether the return has fallen credibly below the best level reached.

A look is one observed return: the mean over finished training episodes, or a scheduled evaluation. A level is the
trimmed mean of the latest looks; each kind of look has its own test and level.

The test is a CUSUM e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). For normal looks with known noise and
their mean at the bound, one step of the test has an expectation of at most 1. The average number of looks until a false
suspicion is then at least `1 / FALSE_ALARM`. Because the noise is estimated, the test enlarges the estimate. The bound
is `_DEVIATIONS` of the noise below the best level, so healthy returns stay above the bound. One look adds at most a
quarter of the evidence for a suspicion, so a single bad evaluation causes none.

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


@dataclasses.dataclass
class Track:
    """Memory of the test for one kind of look, as plain JSON.

    Attributes:
        recent: Latest looks, the newest last.
        earlier: Looks before `recent`, the newest last, for the estimate of the noise.
        start: First look; None before it.
        best: Greatest level; None before the first `_RECENT` looks.
        sure: Greatest lower bound of a level: the level minus `_DEVIATIONS` of the noise. None before the first bound.
        evidence: Logarithm of the test's e-value, never below 0.
    """

    recent: list[float] = dataclasses.field(default_factory=list)
    earlier: list[float] = dataclasses.field(default_factory=list)
    start: float | None = None
    best: float | None = None
    sure: float | None = None
    evidence: float = 0.0

    def look(self, value: float, tolerance: float) -> bool:
        """Records a look; returns whether the look and the level are the best so far.

        Args:
            value: A mean return.
            tolerance: Share of the gain since the start that may be lost.
        """
        if self.start is None:
            self.start = value
        if self.best is not None and self.sure is not None:
            bound = min(self.best - tolerance * self.gain, self.sure)
            if self.evidence > 0.0 or value < bound:
                # Looks during a fall must not enlarge the noise, and quiet looks must not shrink it.
                noise = max(self.noise(self.earlier), (self.best - self.sure) / _DEVIATIONS)
                # exp(z - 1/2) has an expectation of at most 1 for a normal look with its mean at or above the bound.
                self.evidence = max(0.0, self.evidence + min((bound - value) / noise - 0.5, _MOST))
        if len(self.recent) == _RECENT:
            self.earlier = [*self.earlier, self.recent[0]][-_WINDOW:]
        self.recent = [*self.recent, value][-_RECENT:]
        return len(self.recent) == _RECENT and self._is_best(value)

    def _is_best(self, value: float) -> bool:
        level, before = self.level, self.best
        is_best = before is None or level >= before
        if is_best:
            self.best = level
        if len(self.earlier) > _FEWEST_STEPS:
            sure = level - _DEVIATIONS * self.noise([*self.earlier, *self.recent])
            self.sure = sure if self.sure is None else max(self.sure, sure)
        return is_best and (before is None or value >= before)

    @property
    def level(self) -> float:
        """Mean of the latest looks without the greatest and the least, so that no single look decides the level."""
        looks = sorted(self.recent)
        looks = looks[1:-1] if len(looks) > 2 else looks
        return math.fsum(looks) / len(looks)

    @property
    def gain(self) -> float:
        """Difference between the best level and the first look, at least 0."""
        return max((self.best or 0.0) - (self.start or 0.0), 0.0)

    def lower(self) -> None:
        """Sets the best level to the present level, after a suspicion that was refuted."""
        self.best, self.sure, self.evidence = self.level, None, 0.0

    def restart(self) -> None:
        """Drops the looks of a collapsed policy; the best level and the noise stay."""
        self.recent, self.evidence = [], 0.0

    def noise(self, looks: list[float]) -> float:
        """Standard deviation of a look, from differences (von Neumann 1941); the greatest of three estimates.

        Two estimates use falls only, because a learning curve rises, while half of the differences of noise are falls.
        The estimate from successive looks misses a drift, so another one uses looks further apart. The third uses the
        latest looks with their rises, because a sparse return may have risen once and not fallen yet.

        Args:
            looks: Looks, the newest last.
        """
        latest = looks[-2 * _RECENT :]
        rises = math.fsum((b - a) ** 2 for a, b in itertools.pairwise(latest))
        noise = math.sqrt(rises / 2.0 / max(len(latest) - 1, 1))
        for lag in (1, _RECENT):
            steps = len(looks) - lag
            if steps >= _FEWEST_STEPS:
                square = math.fsum((a - b) ** 2 for a, b in zip(looks, looks[lag:], strict=False) if b < a) / steps
                noise = max(noise, math.sqrt(square) * (1.0 + _CAUTION / steps))
        return max(noise, _NOISE_SHARE * max(self.gain, abs(self.best or 0.0)), 1e-12)


@dataclasses.dataclass
class WatchMemory:
    """Memory of the return watch, as plain JSON; saved with the run.

    Attributes:
        training: Looks at training episodes.
        evaluation: Looks at evaluations.
        total: Sum of the returns of the episodes in the next look.
        episodes: Number of episodes in the next look.
        best_evaluation: Greatest evaluation since the last refuted suspicion; None before the first.
        collapses: Number of confirmed collapses.
        refuted: Number of refuted suspicions.
    """

    training: Track = dataclasses.field(default_factory=Track)
    evaluation: Track = dataclasses.field(default_factory=Track)
    total: float = 0.0
    episodes: int = 0
    best_evaluation: float | None = None
    collapses: int = 0
    refuted: int = 0

    @classmethod
    def of(cls, saved: dict[str, Any]) -> WatchMemory:
        """Reads the memory in a checkpoint."""
        tracks: dict[str, Any] = {name: Track(**saved[name]) for name in ("training", "evaluation") if name in saved}
        return cls(**saved | tracks)


@dataclasses.dataclass
class ReturnWatch:
    """Detects that a policy returns less than the best policy of the run.

    Attributes:
        tolerance: Share of the gain since the start that may be lost.
        episodes: Training episodes per look.
        memory: Memory of the watch.
    """

    tolerance: float
    episodes: int
    memory: WatchMemory

    def train(self, mean_return: float, episodes: int) -> bool | None:
        """Records the training episodes of an iteration.

        Args:
            mean_return: Mean return; NaN without episodes.
            episodes: Number of finished episodes.

        Returns:
            Whether the level is the best so far; None if the iteration completes no look. The first level does not
            count as the best after an evaluation, because the evaluated policy may have been better.
        """
        memory = self.memory
        if episodes > 0 and math.isfinite(mean_return):
            memory.total += mean_return * episodes
            memory.episodes += episodes
        if memory.episodes < self.episodes:
            return None
        value, memory.total, memory.episodes = memory.total / memory.episodes, 0.0, 0
        is_first = memory.training.best is None
        is_best = memory.training.look(value, self.tolerance)
        return is_best and not (is_first and memory.best_evaluation is not None)

    def evaluate(self, mean_return: float | None) -> bool:
        """Records an evaluation, None if every episode was aborted; returns whether it is the greatest so far."""
        if mean_return is None or not math.isfinite(mean_return):
            return False
        memory = self.memory
        memory.evaluation.look(mean_return, self.tolerance)
        if memory.best_evaluation is not None and mean_return <= memory.best_evaluation:
            return False
        memory.best_evaluation = mean_return
        return True

    @property
    def suspects(self) -> bool:
        """Whether to compare the policy with the best policy."""
        return max(self.memory.training.evidence, self.memory.evaluation.evidence) >= SUSPICION

    def ends_below(self, last: float | None) -> bool:
        """Whether the last evaluation of a run is so low that the policy must be compared with the best policy.

        With few evaluations the reference is the level of training, which exploration can only lower.
        """
        memory = self.memory
        if len(memory.evaluation.earlier) + len(memory.evaluation.recent) >= _FEWEST_EVALUATIONS:
            best, start = memory.best_evaluation, memory.evaluation.start
        else:
            best, start = memory.training.best, memory.training.start
        if best is None or start is None:
            return False
        if last is None:
            return True
        tolerance = min(self.tolerance, _AT_THE_END)
        return last < best - max(tolerance * max(best - start, 0.0), _NOISE_SHARE * abs(best))

    def is_worse(self, best: np.ndarray, now: np.ndarray, at_the_end: bool = False) -> bool | None:
        """Whether a policy returns credibly less than the best policy, by more than the tolerance.

        Args:
            best: Returns of the best policy, `[episodes]`; NaN for an aborted episode.
            now: Returns of the present policy in episodes from the same first states.
            at_the_end: Whether no training steps are left, so that the tolerance is smaller.

        Returns:
            Whether the policy is worse; None if the episodes are too few or too different.
        """
        # Episodes that only one policy aborts do not count, unless the present policy aborts nearly all episodes.
        both = np.isfinite(best) & np.isfinite(now)
        if int(np.isfinite(best).sum()) >= _FEWEST_PAIRS and np.isfinite(now).mean() < _ABORTED:
            return True
        if int(both.sum()) < _FEWEST_PAIRS:
            return None
        start = self.memory.training.start
        gain = abs(float(best[both].mean())) if start is None else float(best[both].mean()) - start
        fall, least = float((best[both] - now[both]).mean()), _NOISE_SHARE * abs(float(best[both].mean()))
        tolerance = min(self.tolerance, _AT_THE_END) if at_the_end else self.tolerance
        if fall <= max(tolerance * gain, least, 0.0):
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
        """Records a confirmed collapse: the run rolls back to the best policy."""
        self.memory.collapses += 1
        self._restart()

    def refute(self, best: np.ndarray, now: np.ndarray) -> None:
        """Records a refuted suspicion: the policy is nearly as good as the best policy, so the level is lowered.

        If the policy is credibly worse within the tolerance, the level stays; small falls must not add up.

        Args:
            best: Returns of the best policy, as for `is_worse`.
            now: Returns of the present policy, as for `is_worse`.
        """
        self.memory.refuted += 1
        if self._falls(best, now):
            self.reset_test()
            return
        self.memory.best_evaluation = float(np.nanmean(now)) if np.isfinite(now).any() else None
        for track in (self.memory.training, self.memory.evaluation):
            if track.recent:
                track.lower()

    def reset_test(self) -> None:
        """Restarts the test at the same level, after an unclear comparison."""
        self.memory.training.evidence = self.memory.evaluation.evidence = 0.0

    def _restart(self) -> None:
        self.memory.total, self.memory.episodes = 0.0, 0
        self.memory.training.restart()
        self.memory.evaluation.restart()
