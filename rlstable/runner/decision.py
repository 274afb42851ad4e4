"""Decides after an iteration: has it failed, has the return collapsed, and what follows? Changes no training state."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rlstable.config.guards import ReturnWatchConfig
from rlstable.config.supervise import RAISE_PRECISION
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of, without_critic
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.host_state import HostState, SeedKeys
from rlstable.runner.log import Row
from rlstable.supervise.recovery import Recovery, RetryPlan
from rlstable.supervise.return_watch import ReturnWatch
from rlstable.supervise.snapshots import Snapshots
from rlstable.supervise.stop_reasons import StopReason


class Action(enum.Enum):
    """The actions of a `Decision`."""

    CONTINUE = enum.auto()
    END_WITH_BEST_POLICY = enum.auto()
    ROLL_BACK = enum.auto()
    PASS_OVER = enum.auto()
    STOP = enum.auto()


class Decision(NamedTuple):
    """The decision after an iteration."""

    action: Action
    cause: StopReason | None = None  # the failure, as the stop reason of a run without recovery
    stop_reason: StopReason | None = None  # of `STOP`: the cause, `recovery_exhausted` or `needs_own_program`
    plan: RetryPlan | None = None  # of `ROLL_BACK`; of `STOP` without a remedy, except with `needs_own_program`
    program: str | None = None  # with `needs_own_program`, the reason why the seed needs another program


def cause_of(
    metrics: Metrics, iterations_without_update: int, patience: int | None, finished: bool, collapsed: bool
) -> StopReason | None:
    """The failure of an iteration, as the stop reason of a run without recovery; None if nothing failed.

    The last iteration has two more checks, because a run must not complete with a bad or untrained state. A run ends
    after `patience` iterations without an update; None is no bound. `collapsed` is the answer of the return watch.
    """
    for name, exhausted in metrics.exhausted.items():
        if exhausted or (finished and name == "finite_state" and metrics.trips[name].any()):
            return StopReason.of_guard(name)
    idle = patience is not None and iterations_without_update >= patience
    untrained = finished and int(metrics.counters.updates) == 0
    if idle or untrained:
        return StopReason.no_update_accepted
    return StopReason.policy_collapsed if collapsed else None


def decide(
    cause: StopReason | None,
    finished: bool,
    host: HostState,
    recovery: Recovery,
    levels_for: Callable[[StopReason], int],
    shared: bool,
) -> Decision:
    """Decides after an iteration that may have failed by a `cause` whether to continue, roll back or stop.

    `levels_for` returns the number of higher precision levels that may cure a cause. If the program is `shared` with
    other seeds, this seed cannot change it.
    """
    if cause is None:
        return Decision(Action.CONTINUE)
    collapse = cause is StopReason.policy_collapsed
    if collapse and finished:  # no steps are left in which the run could recover
        return Decision(Action.END_WITH_BEST_POLICY, cause)
    at = host.logged_iteration
    if recovery.repeats(host.attempts, cause.name, at, host.iteration):
        return Decision(Action.PASS_OVER, cause)
    plan = recovery.plan(host.attempts, cause.name, at, host.iteration, levels_for(cause), collapse)
    if plan.remedy is not None and plan.remedy.name == RAISE_PRECISION and shared:
        program = f"its next remedy is {RAISE_PRECISION}"
        return Decision(Action.STOP, cause, StopReason.needs_own_program, program=program)
    if plan.remedy is not None:
        return Decision(Action.ROLL_BACK, cause, plan=plan)
    exhausted = bool(plan.attempts.recent) and not collapse and cause is not StopReason.physics_unstable
    return Decision(Action.STOP, cause, StopReason.recovery_exhausted if exhausted else cause, plan)


@dataclasses.dataclass(eq=False)
class ReturnCheck:
    """The return watch of one seed; does nothing if the watch or recovery is off.

    Each iteration calls `train` and `suspects`, then `compare` if `suspects` returned True, and at the end `keep`.
    """

    guard: ReturnWatchConfig
    total_steps: int
    host: HostState
    keys: SeedKeys
    snapshots: Snapshots
    event: Callable[..., None]
    enabled: bool
    collapsed: bool = False  # whether this iteration's comparison has confirmed a collapse
    best_return: float | None = None  # of the best policy in the comparison that confirmed the last collapse
    fallen_return: float | None = None  # of the collapsed policy in the same episodes; None if all aborted
    _healthy: bool = False
    _is_best: bool | None = None  # by training; None without a look
    _evaluated_best: bool = False

    @property
    def _watch(self) -> ReturnWatch:
        # A resume replaces `host.watch`, so the state is not kept here.
        return ReturnWatch(self.guard.tolerance, self.guard.episodes, self.host.watch)

    def train(self, metrics: Metrics) -> None:
        """Records the training episodes of an iteration, unless its state is bad."""
        self._healthy = bool(metrics.healthy)
        episodes = int(metrics.counters.episodes) - self.host.episodes
        self.host.episodes += episodes
        self._is_best = None
        if self.enabled and self._healthy:
            self._is_best = self._watch.train(float(metrics.values["episode/sum_reward"]), episodes)
            self.snapshots.promote_candidate(self._is_best)

    def suspects(self, evaluation: Row) -> bool:
        """Whether the return may have collapsed, so that `compare` must decide; the evaluation may be empty."""
        self.collapsed = self._evaluated_best = False
        if not self.enabled or not self._healthy:
            return False
        value = evaluation.get("eval/episode_reward")
        if evaluation:
            self._evaluated_best = self._watch.evaluate(value)
        ends_below = self._finished and self._watch.ends_below(value)
        best = self.snapshots.best
        return (self._watch.suspects or ends_below) and not best.empty and best.iteration < self.host.iteration

    def policy_pair(self, state: TrainState) -> tuple[PolicySnapshot, PolicySnapshot]:
        """The best and the present policy with the same random key, for the episodes of `compare`."""
        key = self.keys.comparison
        return without_critic(*self.snapshots.best.policy, key), snapshot_of(state, key)

    def compare(self, best_returns: np.ndarray, present_returns: np.ndarray) -> None:
        """Decides whether the return has collapsed, from paired episodes of the policies of `policy_pair`.

        Both returns are `[B]`, NaN where an episode does not count.
        """
        returns = {
            "best_return": _mean(best_returns),
            "return": _mean(present_returns),
            "best_iteration": self.snapshots.best.iteration,
        }
        worse = self._watch.is_worse(best_returns, present_returns, self._finished)
        if worse and not self._finished and self.host.watch.training.holds:
            worse = None  # training does not show the fall: exploration, or a task that only training sees
        self.collapsed = worse is True
        if worse:
            self._watch.confirm()
            self.event("guard_tripped", guard="return_watch", collapsed=1)
            self.event("return_collapsed", **returns)
            self.best_return, self.fallen_return = _mean(best_returns), _mean(present_returns)
        elif worse is None:
            self._watch.reset_test()
            self.event("return_fall_unclear", **returns)
        else:
            self._watch.refute(best_returns, present_returns)
            self.event("return_fall_refuted", **returns)

    def keep(self, state: TrainState) -> None:
        """Keeps a good state as the best one or as the candidate for it, if the returns of this iteration say so."""
        host = self.host
        if self._evaluated_best:
            self.snapshots.best.keep(state, host.iteration, host.step)
        if self._is_best is not None:
            self.snapshots.candidate.keep(state, host.iteration, host.step)

    @property
    def _finished(self) -> bool:
        return self.host.step >= self.total_steps


def _mean(returns: np.ndarray) -> float | None:
    return float(np.nanmean(returns)) if np.isfinite(returns).any() else None
