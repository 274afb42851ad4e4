"""Return watch: a sequential test of whether the return has fallen credibly below the best that was reached.

Looks are means over finished training episodes, or scheduled evaluations; each kind has a level of its own. The test is
a CUSUM e-detector (Shin, Ramdas and Rinaldo 2022, arXiv:2203.03532). While the mean of the looks has not fallen below
the tolerated level, one step of the test has an expectation of at most 1, so the average number of looks until a false
suspicion is at least `1 / FALSE_ALARM`. One look moves the test by a quarter of the way at most, so a single bad
evaluation is no suspicion.

A suspicion changes nothing by itself. The policy is compared with the best one in the same fresh episodes
(`is_worse`), which exploration noise, or a task that has become harder, cannot fool. Everything depends on looks alone,
never on the clock, so a resumed run decides as the run would have.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

FALSE_ALARM = 1e-4  # per look; its inverse bounds the average number of looks until a false suspicion from below
SUSPICION = math.log(1.0 / FALSE_ALARM)
_MOST = SUSPICION / 4.0  # that a single look adds
_WINDOW = 20  # looks whose differences give the noise
_NOISE_SHARE = 0.02  # of the gain: the least noise that looks are credited with
_DEVIATIONS = 3.0  # of the noise: a smaller fall is never a suspicion
_LEARNT = 5.0  # deviations of the noise that must have been gained: before that nothing is learnt that could be lost
_AT_THE_END = 0.2  # of the gain: what the last state of a run may have lost
_CONFIRMING = 3.1  # standard errors of the paired difference: one confirmation in 1,000 is false
_FEWEST_PAIRS = 4


@dataclasses.dataclass
class Track:
    """What the test remembers of one kind of look, as plain JSON.

    Attributes:
        held: Looks that a level is the mean of. A policy is good when it stays so: in the first iterations returns
            leap and fall while the critic knows nothing.
        recent: Latest looks, the newest last.
        start: First look; None before it.
        best: Greatest level; None before there were enough looks.
        evidence: Logarithm of the test's e-value, never below 0.
    """

    held: int
    recent: list[float] = dataclasses.field(default_factory=list)
    start: float | None = None
    best: float | None = None
    evidence: float = 0.0

    def look(self, value: float, tolerance: float) -> bool:
        """Takes in a look; whether the level is the best one so far.

        Args:
            value: A mean return.
            tolerance: Share of what was gained since the start that may be lost.
        """
        if self.start is None:
            self.start = value
        noise = self._noise()
        if self.best is not None and self._gain >= _LEARNT * noise:
            bound = self.best - max(tolerance * self._gain, _DEVIATIONS * noise)
            # exp(z - 1/2) has expectation 1 at most where the look is normal around the bound or above it.
            self.evidence = max(0.0, self.evidence + min((bound - value) / noise - 0.5, _MOST))
        self.recent = [*self.recent, value][-_WINDOW:]
        if len(self.recent) < self.held:
            return False
        level = self.level
        if self.best is not None and level < self.best:
            return False
        self.best = level
        return True

    @property
    def level(self) -> float:
        """Mean of the latest looks."""
        return float(np.mean(self.recent[-self.held :]))

    def lower(self) -> None:
        """Takes the present level as the best one: what was suspected is no fall of the policy."""
        self.best, self.evidence = self.level, 0.0

    def restart(self) -> None:
        """Forgets the looks of a policy that was given up; the level that it fell from stays."""
        self.recent, self.evidence = [], 0.0

    @property
    def _gain(self) -> float:
        return max((self.best or 0.0) - (self.start or 0.0), 0.0)

    def _noise(self) -> float:
        """Standard deviation of a look, from successive differences (von Neumann 1941), which a trend hardly moves."""
        steps = np.diff(self.recent)
        noise = math.sqrt(float(np.mean(np.square(steps))) / 2.0) if steps.size else 0.0
        floor = _NOISE_SHARE * max(self._gain, abs(self.best or 0.0))
        return max(noise, floor, 1e-12)


@dataclasses.dataclass
class WatchMemory:
    """What the return watch remembers, as plain JSON; saved with the run.

    Attributes:
        training: Looks at training episodes.
        evaluation: Looks at evaluations.
        total: Sum of the returns of the episodes of the next look.
        episodes: How many they are.
        collapses: Collapses that were confirmed.
        refuted: Suspicions that were not.
    """

    training: Track = dataclasses.field(default_factory=lambda: Track(held=10))
    evaluation: Track = dataclasses.field(default_factory=lambda: Track(held=3))
    total: float = 0.0
    episodes: int = 0
    collapses: int = 0
    refuted: int = 0

    @classmethod
    def of(cls, saved: dict[str, Any]) -> WatchMemory:
        """What a checkpoint holds of it."""
        tracks: dict[str, Any] = {name: Track(**saved[name]) for name in ("training", "evaluation") if name in saved}
        return cls(**saved | tracks)


@dataclasses.dataclass
class ReturnWatch:
    """Decides when a policy is suspected of having lost what it had learnt.

    Attributes:
        tolerance: Share of what was gained since the start that may be lost.
        episodes: Training episodes of one look.
        memory: What it remembers.
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
            Whether the level is the best one so far; None where it was not time for a look.
        """
        own = self.memory
        if episodes > 0 and math.isfinite(mean_return):
            own.total += mean_return * episodes
            own.episodes += episodes
        if own.episodes < self.episodes:
            return None
        value, own.total, own.episodes = own.total / own.episodes, 0.0, 0
        return own.training.look(value, self.tolerance)

    def evaluate(self, mean_return: float | None) -> None:
        """Takes in an evaluation; None where every episode was aborted."""
        if mean_return is not None and math.isfinite(mean_return):
            self.memory.evaluation.look(mean_return, self.tolerance)

    @property
    def suspects(self) -> bool:
        """Whether the policy is to be compared with the best one."""
        return max(self.memory.training.evidence, self.memory.evaluation.evidence) >= SUSPICION

    def ends_below(self, last: float | None) -> bool:
        """Whether the last evaluation of a run is below what is tolerated, so that it is to be compared at once."""
        track = self.memory.evaluation
        if last is None or track.best is None or track.start is None:
            return False
        best = max(track.best, *track.recent)
        return last < best - _AT_THE_END * max(best - track.start, 0.0)

    def is_worse(self, best: np.ndarray, now: np.ndarray, at_the_end: bool = False) -> bool:
        """Whether a policy returns credibly less than the best one in the same episodes, and less than is tolerated.

        Args:
            best: Returns of the best policy, `[episodes]`, NaN where an episode was aborted.
            now: Returns of the present one in episodes from the same first states.
            at_the_end: Whether nothing can mend it any more, so that little is tolerated.
        """
        # An episode that only the present policy breaks counts for nothing: the quarantine judges those.
        both = np.isfinite(best) & np.isfinite(now)
        if int(both.sum()) < _FEWEST_PAIRS:
            return False
        lost = best[both] - now[both]
        error = float(lost.std(ddof=1)) / math.sqrt(lost.size)
        start = self.memory.training.start
        gain = abs(float(best[both].mean())) if start is None else float(best[both].mean()) - start
        fall, tolerance = float(lost.mean()), _AT_THE_END if at_the_end else self.tolerance
        return fall > _CONFIRMING * error and fall > tolerance * max(gain, 0.0) and fall > 0.0

    def confirmed(self) -> None:
        """The policy is given up for the best one."""
        self.memory.collapses += 1
        self._forget()

    def refute(self) -> None:
        """The policy is as good as the best one: what fell is the level, not the policy."""
        self.memory.refuted += 1
        for track in (self.memory.training, self.memory.evaluation):
            if track.recent:
                track.lower()

    def _forget(self) -> None:
        self.memory.total, self.memory.episodes = 0.0, 0
        self.memory.training.restart()
        self.memory.evaluation.restart()
