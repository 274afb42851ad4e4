"""Decides after an iteration: continue, end with the best policy, roll back, pass over, or stop. Changes no state."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple

from rlstable.config import Config
from rlstable.config.supervise import RAISE_PRECISION
from rlstable.ppo.state import Metrics
from rlstable.runner.host_state import HostState
from rlstable.supervise.recovery import Recovery, RetryPlan
from rlstable.supervise.stop_reasons import StopReason


class Action(enum.Enum):
    """The actions of a `Decision`."""

    CONTINUE = enum.auto()
    END_WITH_BEST_POLICY = enum.auto()
    ROLL_BACK = enum.auto()
    PASS_OVER = enum.auto()
    STOP = enum.auto()


class Decision(NamedTuple):
    """The decision after an iteration.

    Attributes:
        action: The action.
        cause: The failure, as the stop reason of a run without recovery; None if nothing failed.
        stop_reason: The stop reason of `STOP`: the cause, `recovery_exhausted` or `needs_own_program`; else None.
        plan: The retry of `ROLL_BACK`. For `STOP` a plan without a remedy, except with `needs_own_program`. Else None.
        program: The reason why the seed needs another program; None except with `needs_own_program`.
    """

    action: Action
    cause: StopReason | None = None
    stop_reason: StopReason | None = None
    plan: RetryPlan | None = None
    program: str | None = None


def cause_of(metrics: Metrics, host: HostState, config: Config, collapsed: bool) -> StopReason | None:
    """The failure of an iteration, as the stop reason of a run without recovery; None if nothing failed.

    The last iteration has two more checks, because a run must not complete with a bad or untrained state. `collapsed`
    is the answer of the return watch.
    """
    finished = host.step >= config.total_steps
    for name, exhausted in metrics.exhausted.items():
        if exhausted or (finished and name == "finite_state" and metrics.trips[name].any()):
            return StopReason.of_guard(name)
    update = config.guards.finite_update
    idle = update.enabled and host.iterations_without_update >= update.patience
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
