"""Recovery: chooses the next remedy after a failure, takes remedies back, and limits the attempts.

Every choice depends on iterations and causes, never on the clock, so a resumed run makes the same choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from rlstable.config.schema import validate
from rlstable.config.supervise import RAISE_PRECISION, RecoveryConfig, Remedy


@dataclasses.dataclass
class Attempts:
    """State of recovery as plain JSON, saved with the run."""

    count: int = 0  # rollbacks of the whole run
    lost_steps: int = 0  # environment steps that were rolled back
    lost_iterations: int = 0
    # Attempts of the window: `{"at", "iteration", "cause", "remedy"}`; `at` counts iterations that were rolled back.
    recent: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    position: int = 0  # remedies of the list used since the last healthy stretch
    applied: list[Any] = dataclasses.field(default_factory=list)  # remedies in effect, as written, the latest last
    healthy: int = 0  # healthy iterations in a row since the last attempt or relaxation
    stretch: int = 0  # healthy iterations after which a remedy is taken back; doubles if that was too early
    relaxed: Any = None  # the remedy taken back last, until the next healthy stretch
    collapse_position: int = 0  # as `position`, of the remedies after a collapse of the return
    critic_episodes: int = 0  # episodes of trouble of the sign `critic_behind` that had their remedy

    @property
    def precision_steps(self) -> int:
        """Steps of the precision above the configured level."""
        return self.applied.count(RAISE_PRECISION)

    def lower_precision(self) -> None:
        self.applied = [remedy for remedy in self.applied if remedy != RAISE_PRECISION]


class RetryPlan(NamedTuple):
    """The next remedy, None after too many attempts or if none applies, and the attempts with this one."""

    remedy: Remedy | None
    attempts: Attempts


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Chooses remedies. Every method returns the new attempts and leaves its arguments unchanged."""

    config: RecoveryConfig
    # By cause whose states are finite, the patience of its guard in iterations. Only these causes can be passed over.
    patience: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, **settings: Any) -> Recovery:
        """Recovery for the loop of another trainer: the keys of `supervise.recovery` that differ from the defaults."""
        return cls(validate(RecoveryConfig, settings))

    def repeats(self, attempts: Attempts, cause: str, at: int, iteration: int) -> bool:
        """Whether a failure came again at the same place, so that one more rollback would lead to it once more.

        The place is the iteration, or the number of iterations since the environments were reset, which happens at the
        start and at every rollback. A divergence that the settings cause follows soon after a rollback instead.
        Arguments as for `plan`.
        """
        patience = self.patience.get(cause)
        if patience is None or not attempts.recent or attempts.recent[-1]["cause"] != cause:
            return False
        last, earlier = attempts.recent[-1], [attempt["at"] for attempt in attempts.recent[:-1]]
        since, before = at - last["at"], last["at"] - (earlier[-1] if earlier else 0)
        later = since - before, iteration - last["iteration"]
        return since > 2 * patience and any(0 <= difference <= patience for difference in later)

    def plan(
        self,
        attempts: Attempts,
        cause: str,
        at: int,
        iteration: int,
        levels: int = 0,
        collapse: bool = False,
    ) -> RetryPlan:
        """Plans the next attempt to avoid `cause`, the name of a stop reason.

        `at` counts iterations with rolled back ones, `iteration` without. `levels` is the number of precision levels
        above the configured one that may cure the cause. The remedy after a `collapse` of the return is one of
        `collapse_remedies`.
        """
        config, new = self.config, self._copy(attempts)
        new.recent = [attempt for attempt in new.recent if at - attempt["at"] < config.window]
        if not config.enabled or len(new.recent) >= config.attempts:
            return RetryPlan(None, new)
        remedy = self._raised_precision(new, levels) or self._next(new, collapse)
        if remedy is None:
            return RetryPlan(None, new)
        new.count += 1
        new.healthy = 0
        if new.relaxed is not None:
            # The remedy was taken back too early: wait longer the next time, or recovery would alternate.
            new.stretch *= 2
            new.relaxed = None
        written = remedy.model_dump(mode="json")
        new.recent.append({"at": at, "iteration": iteration, "cause": cause, "remedy": written})
        if remedy.lasts:
            new.applied.append(written)
        return RetryPlan(remedy, new)

    def speed_up_critic(self, attempts: Attempts, episodes: int) -> tuple[Attempts, Remedy | None]:
        """Plans the remedy for a critic that lags behind, once in each of its `episodes`, unless it is in effect."""
        factor = self.config.lagging_critic_rate
        if factor is None or episodes <= attempts.critic_episodes:
            return attempts, None
        remedy = Remedy(name="scale_critic_rate", factor=factor)
        new, written = self._copy(attempts), remedy.model_dump(mode="json")
        new.critic_episodes = episodes
        if written in new.applied:
            return new, None
        if new.relaxed == written:  # taken back too early
            new.stretch, new.relaxed = 2 * new.stretch, None
        new.healthy = 0
        new.applied.append(written)
        return new, remedy

    def after(self, attempts: Attempts, good: bool) -> tuple[Attempts, Remedy | None]:
        """Counts an iteration; after a long healthy stretch, the second item is the remedy to take back."""
        new = self._copy(attempts)
        new.healthy = new.healthy + 1 if good else 0
        if new.healthy < new.stretch:
            return new, None
        new.healthy = 0
        new.relaxed = None
        new.position = new.collapse_position = 0
        if not new.applied:
            return new, None
        new.relaxed = new.applied.pop()
        return new, Remedy.model_validate(new.relaxed)

    def _copy(self, attempts: Attempts) -> Attempts:
        stretch = attempts.stretch or self.config.relax_after
        return dataclasses.replace(attempts, stretch=stretch, recent=[*attempts.recent], applied=[*attempts.applied])

    def _raised_precision(self, new: Attempts, levels: int) -> Remedy | None:
        """The remedy that raises the precision, if a level above the present one may help and was not tried yet.

        If no level has helped, precision is not the cause, and the run returns to the configured level.
        """
        remedy = Remedy.model_validate(RAISE_PRECISION)
        if levels == 0 or remedy not in self.config.remedies:
            return None
        tried = sum(attempt["remedy"] == RAISE_PRECISION for attempt in new.recent)
        if new.relaxed == RAISE_PRECISION or tried < levels:
            return remedy
        new.lower_precision()
        return None

    def _next(self, new: Attempts, collapse: bool) -> Remedy | None:
        """The remedy taken back last if it is in the list, else the next remedy of the list, which starts again."""
        written = self.config.collapse_remedies if collapse else self.config.remedies
        remedies = [remedy for remedy in written if remedy.name != RAISE_PRECISION]
        position = "collapse_position" if collapse else "position"
        if new.relaxed is not None:
            relaxed = Remedy.model_validate(new.relaxed)
            if relaxed in remedies:
                return relaxed
        if not remedies:
            return None
        remedy = remedies[getattr(new, position) % len(remedies)]
        setattr(new, position, getattr(new, position) + 1)
        return remedy
