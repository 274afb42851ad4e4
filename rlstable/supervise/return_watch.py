"""Return watch: a sequential test of whether the return has fallen credibly below the best that was reached.

Looks are means over finished training episodes, or scheduled evaluations; each kind has its level. The test is
a CUSUM e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). Where looks are normal, their noise is known and
their mean is at the bound, one step of the test has an expectation of at most 1, so the average number of looks until a
false suspicion is at least `1 / FALSE_ALARM`. The noise is estimated, so it counts more than it was measured, and the
bound is `_DEVIATIONS` of it below the best level: healthy returns stay above it. One look moves the test by at most a
quarter of the way, so a single bad evaluation is no suspicion.

A suspicion changes nothing by itself. The policy is compared with the best one in the same fresh episodes
(`is_worse`), which exploration noise, or a task that has become harder, cannot fool. Everything depends on looks alone,
never on the clock, so a resumed run decides as the run would have.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from scipy.special import stdtrit

FALSE_ALARM = 1e-4  # per look; its inverse bounds the average number of looks until a false suspicion from below
SUSPICION = math.log(1.0 / FALSE_ALARM)
_MOST = SUSPICION / 4.0  # that a single look adds
_RECENT = 5  # looks that give a level
_WINDOW = 60  # looks whose differences give the noise
_FEWEST_STEPS = 6  # differences before the first verdict
_CAUTION = 8.0  # the noise of n differences counts 1 + _CAUTION / n times: it may be that much by 99 of 100 chances
_NOISE_SHARE = 0.02  # of the gain: the least noise that looks are credited with
_DEVIATIONS = 3.0  # of the noise: a smaller fall is never a suspicion
_AT_THE_END = 0.2  # of the gain: what the last state of a run may have lost
_FALSE_CONFIRMATION = 1e-3  # probability that a paired comparison confirms a collapse of equally good policies
_FALSE_HANDOVER = 0.05  # the same at the end of a run, where a mistake hands over a policy that is as good
_FEWEST_PAIRS = 4
_ABORTED = 0.1  # of the episodes: a policy that finishes fewer has collapsed
_FEWEST_EVALUATIONS = 3  # before the last one of a run is compared with them


@dataclasses.dataclass
class Track:
    """Memory of the test for one kind of look, as plain JSON.

    Attributes:
        recent: Latest looks, the newest last.
        earlier: Looks before `recent`, the newest last; they give the noise.
        start: First look; None before it.
        best: Greatest level; None before there were `_RECENT` looks.
        sure: Greatest level that is no luck, each level less `_DEVIATIONS` of its noise; None before there was one.
        evidence: Logarithm of the test's e-value, never below 0.
    """

    recent: list[float] = dataclasses.field(default_factory=list)
    earlier: list[float] = dataclasses.field(default_factory=list)
    start: float | None = None
    best: float | None = None
    sure: float | None = None
    evidence: float = 0.0

    def look(self, value: float, tolerance: float) -> bool:
        """Takes in a look; whether it and the level are the best so far.

        Args:
            value: A mean return.
            tolerance: Share of what was gained since the start that may be lost.
        """
        if self.start is None:
            self.start = value
        if self.best is not None and self.sure is not None:
            bound = min(self.best - tolerance * self.gain, self.sure)
            if self.evidence > 0.0 or value < bound:
                # The looks of a fall are no noise, and a lull makes no look more exact than it was at the best level.
                noise = max(self.noise(self.earlier), (self.best - self.sure) / _DEVIATIONS)
                # exp(z - 1/2) has expectation 1 at most where the look is normal around the bound or above it.
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
        """Mean of the latest looks without the greatest and the least one, so that no single look makes a level."""
        looks = sorted(self.recent)
        looks = looks[1:-1] if len(looks) > 2 else looks
        return math.fsum(looks) / len(looks)

    @property
    def gain(self) -> float:
        """How much the best level is above the first look."""
        return max((self.best or 0.0) - (self.start or 0.0), 0.0)

    def lower(self) -> None:
        """Takes the present level as the best one: what was suspected is no fall of the policy."""
        self.best, self.sure, self.evidence = self.level, None, 0.0

    def restart(self) -> None:
        """Forgets the looks of a policy that was given up; the level that it fell from and the noise stay."""
        self.recent, self.evidence = [], 0.0

    def noise(self, looks: list[float]) -> float:
        """Standard deviation of a look, from differences (von Neumann 1941); the greatest of three estimates.

        Of older looks only the falls count: a learning curve rises, and of noise half the differences are falls. The
        estimate from successive looks misses a drift. The one from the latest looks counts rises too, since a return
        that is rarely paid may have risen once and not yet fallen.

        Args:
            looks: In their order.
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
        total: Sum of the returns of the episodes of the next look.
        episodes: Number of these episodes.
        best_evaluation: Greatest evaluation, after a refuted suspicion only of later ones; None before the first.
        collapses: Collapses that were confirmed.
        refuted: Suspicions that were not.
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
        """The memory that a checkpoint holds."""
        tracks: dict[str, Any] = {name: Track(**saved[name]) for name in ("training", "evaluation") if name in saved}
        return cls(**saved | tracks)


@dataclasses.dataclass
class ReturnWatch:
    """Suspects a policy of having lost the task it had learned.

    Attributes:
        tolerance: Share of what was gained since the start that may be lost.
        episodes: Training episodes of one look.
        memory: Memory of the watch.
    """

    tolerance: float
    episodes: int
    memory: WatchMemory

    def train(self, mean_return: float, episodes: int) -> bool | None:
        """Takes in the training episodes of an iteration.

        Args:
            mean_return: Their mean return; NaN where there were none.
            episodes: How many finished.

        Returns:
            Whether the level is the best one so far; None where it was not time for a look. The first level is no best
            one if there was an evaluation before: that policy may have been better.
        """
        own = self.memory
        if episodes > 0 and math.isfinite(mean_return):
            own.total += mean_return * episodes
            own.episodes += episodes
        if own.episodes < self.episodes:
            return None
        value, own.total, own.episodes = own.total / own.episodes, 0.0, 0
        is_first = own.training.best is None
        is_best = own.training.look(value, self.tolerance)
        return is_best and not (is_first and own.best_evaluation is not None)

    def evaluate(self, mean_return: float | None) -> bool:
        """Takes in an evaluation, None where every episode was aborted; whether it is the greatest one."""
        if mean_return is None or not math.isfinite(mean_return):
            return False
        own = self.memory
        own.evaluation.look(mean_return, self.tolerance)
        if own.best_evaluation is not None and mean_return <= own.best_evaluation:
            return False
        own.best_evaluation = mean_return
        return True

    @property
    def suspects(self) -> bool:
        """Whether to compare the policy with the best one."""
        return max(self.memory.training.evidence, self.memory.evaluation.evidence) >= SUSPICION

    def ends_below(self, last: float | None) -> bool:
        """Whether the last evaluation of a run is below the tolerance, so that the policy must be compared at once.

        Where there were few evaluations the level of training is the measure: exploration only lowers it.
        """
        own = self.memory
        if len(own.evaluation.earlier) + len(own.evaluation.recent) >= _FEWEST_EVALUATIONS:
            best, start = own.best_evaluation, own.evaluation.start
        else:
            best, start = own.training.best, own.training.start
        if best is None or start is None:
            return False
        if last is None:
            return True
        tolerance = min(self.tolerance, _AT_THE_END)
        return last < best - max(tolerance * max(best - start, 0.0), _NOISE_SHARE * abs(best))

    def is_worse(self, best: np.ndarray, now: np.ndarray, at_the_end: bool = False) -> bool | None:
        """Whether a policy returns credibly less than the best one in the same episodes, and less than is tolerated.

        Args:
            best: Returns of the best policy, `[episodes]`, NaN where an episode was aborted.
            now: Returns of the present one in episodes from the same first states.
            at_the_end: Whether no steps are left that could mend it, so that little is tolerated.

        Returns:
            Whether the policy is worse; None if the episodes are too few or too different.
        """
        # An episode that only the present policy breaks counts for nothing, unless it breaks nearly all of them.
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
        """Whether the paired difference is credibly above 0, by Student's t with this probability of a mistake."""
        lost = (best - now)[np.isfinite(best) & np.isfinite(now)]
        if lost.size < _FEWEST_PAIRS:
            return False
        error = float(lost.std(ddof=1)) / math.sqrt(lost.size)
        return float(lost.mean()) > float(stdtrit(lost.size - 1, 1.0 - mistake)) * error

    def confirmed(self) -> None:
        """The policy is given up for the best one."""
        self.memory.collapses += 1
        self._forget()

    def refute(self, best: np.ndarray, now: np.ndarray) -> None:
        """The policy is nearly as good as the best one: what fell is the level, not the policy.

        Where it is credibly worse all the same, the level stays, or small falls would add up to a large one.

        Args:
            best: As for `is_worse`.
            now: Likewise.
        """
        self.memory.refuted += 1
        if self._falls(best, now):
            self.wait()
            return
        self.memory.best_evaluation = float(np.nanmean(now)) if np.isfinite(now).any() else None
        for track in (self.memory.training, self.memory.evaluation):
            if track.recent:
                track.lower()

    def wait(self) -> None:
        """Keeps the level and starts the test again, after an unclear comparison."""
        self.memory.training.evidence = self.memory.evaluation.evidence = 0.0

    def _forget(self) -> None:
        self.memory.total, self.memory.episodes = 0.0, 0
        self.memory.training.restart()
        self.memory.evaluation.restart()
