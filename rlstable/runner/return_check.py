"""Checks whether the return of one seed has collapsed, and follows which state is the best."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlstable.config import Config
from rlstable.policy.evaluator import PolicySnapshot, snapshot_of
from rlstable.ppo.state import Metrics, TrainState
from rlstable.runner.host_state import HostState, SeedKeys
from rlstable.runner.result import Row
from rlstable.supervise.return_watch import ReturnWatch
from rlstable.supervise.snapshots import Snapshots


class ReturnCheck:
    """The return watch of one seed; does nothing if the watch or recovery is off.

    Each iteration calls `train` and `suspects`, then `compare` if `suspects` returned True, and at the end `keep`.

    Attributes:
        enabled: Whether the return is watched.
        collapsed: Whether this iteration's comparison has confirmed a collapse.
        best_return: Return of the best policy in the episodes of the comparison; None before the first collapse.
        fallen_return: Return of the collapsed policy in the same episodes; None if every episode was aborted.
    """

    def __init__(
        self, config: Config, host: HostState, keys: SeedKeys, snapshots: Snapshots, event: Callable[..., None]
    ):
        guard = config.guards.return_watch
        self.enabled = guard.enabled and config.supervise.recovery.enabled
        self._watch = ReturnWatch(guard.tolerance, guard.episodes, host.watch)
        self._total_steps = config.total_steps
        self._host = host
        self._keys = keys
        self._snapshots = snapshots
        self._event = event
        self._is_best: bool | None = None
        self._healthy = self._evaluated_best = False
        self.collapsed = False
        self.best_return: float | None = None
        self.fallen_return: float | None = None

    def train(self, metrics: Metrics) -> None:
        """Records the training episodes of an iteration, unless its state is bad."""
        self._healthy = bool(metrics.healthy)
        episodes = int(metrics.counters.episodes) - self._host.episodes
        self._host.episodes += episodes
        self._is_best = None
        if self.enabled and self._healthy:
            self._is_best = self._watch.train(float(metrics.values["episode/sum_reward"]), episodes)
            self._snapshots.promote_candidate(self._is_best)

    def suspects(self, evaluation: Row) -> bool:
        """Whether the return may have collapsed, so that `compare` must decide; the evaluation may be empty."""
        self.collapsed = self._evaluated_best = False
        if not self.enabled or not self._healthy:
            return False
        value = evaluation.get("eval/episode_reward")
        if evaluation:
            self._evaluated_best = self._watch.evaluate(value)
        ends_below = self._finished and self._watch.ends_below(value)
        best = self._snapshots.best
        return (self._watch.suspects or ends_below) and not best.empty and best.iteration < self._host.iteration

    def policy_pair(self, state: TrainState) -> tuple[PolicySnapshot, PolicySnapshot]:
        """The best and the present policy with the same random key, for the episodes of `compare`."""
        key = self._keys.comparison
        params, statistics = self._snapshots.best.policy
        return PolicySnapshot(params, statistics, key), snapshot_of(state, key)

    def compare(self, best_returns: np.ndarray, present_returns: np.ndarray) -> None:
        """Decides whether the return has collapsed, from paired episodes of the policies of `policy_pair`.

        Both returns are `[B]`, NaN where an episode does not count.
        """
        returns = {
            "best_return": _mean(best_returns),
            "return": _mean(present_returns),
            "best_iteration": self._snapshots.best.iteration,
        }
        worse = self._watch.is_worse(best_returns, present_returns, self._finished)
        if worse and not self._finished and self._host.watch.training.holds:
            worse = None  # training does not show the fall: exploration, or a task that only training sees
        self.collapsed = worse is True
        if worse:
            self._watch.confirm()
            self._event("guard_tripped", guard="return_watch", collapsed=1)
            self._event("return_collapsed", **returns)
            self.best_return, self.fallen_return = _mean(best_returns), _mean(present_returns)
        elif worse is None:
            self._watch.reset_test()
            self._event("return_fall_unclear", **returns)
        else:
            self._watch.refute(best_returns, present_returns)
            self._event("return_fall_refuted", **returns)

    def keep(self, state: TrainState) -> None:
        """Keeps a good state as the best one or as the candidate for it, if the returns of this iteration say so."""
        host = self._host
        if self._evaluated_best:
            self._snapshots.best.keep(state, host.iteration, host.step)
        if self._is_best is not None:
            self._snapshots.candidate.keep(state, host.iteration, host.step)

    @property
    def _finished(self) -> bool:
        return self._host.step >= self._total_steps


def _mean(returns: np.ndarray) -> float | None:
    return float(np.nanmean(returns)) if np.isfinite(returns).any() else None
