"""Stop reasons of a run, with their exit codes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

_KEPT = "the last good checkpoint is kept"
_PATIENCE = "guards.finite_update.patience iterations"


class StopReason(Enum):
    """A stop reason with its exit code and its meaning."""

    completed = (0, "all steps were trained")
    target_reached = (0, "the evaluation return reached eval.target_return")
    stopped = (0, "the callback requested it")
    config_error = (2, "the configuration is wrong; nothing was trained")
    state_not_finite = (3, f"parameters, optimizer or observation statistics stayed bad; {_KEPT}")
    no_update_accepted = (4, f"no update was accepted for {_PATIENCE} in a row, or in the whole run; {_KEPT}")
    physics_unstable = (5, f"more than guards.storm.max_share of the samples stayed bad; {_KEPT}")
    value_loss_exploded = (6, f"the value error stayed larger than any return of the task; {_KEPT}")
    policy_diverged = (7, f"the policy stayed outside the bounds of guards.policy; {_KEPT}")
    policy_collapsed = (12, "the return fell again and again below the best that was reached; the best state is kept")
    guard_exhausted = (8, f"one of your own guards lost its patience; {_KEPT}")
    recovery_exhausted = (9, f"all attempts that supervise.recovery allows have failed; {_KEPT}")
    out_of_memory = (10, f"training needs more memory than available with every memory plan; {_KEPT}")
    needs_own_program = (11, f"this seed needs a program that the other seeds do not share; {_KEPT}")
    not_saved = (13, "the last state could not be saved; only older states may be saved")
    time_limit = (75, "supervise.max_wall_time is over; the last iteration was saved, resume to continue")
    error = (1, "the program failed; the traceback was printed")
    interrupted = (130, "stopped by Ctrl-C after an iteration")
    preempted = (143, "stopped by SIGTERM or SIGHUP after an iteration")

    def __init__(self, exit_code: int, meaning: str):
        self.exit_code = exit_code
        self.meaning = meaning

    @classmethod
    def of_guard(cls, name: str) -> StopReason:
        """The stop reason of a run whose state guard `name` has lost its patience."""
        return {
            "finite_state": cls.state_not_finite,
            "storm": cls.physics_unstable,
            "value_loss": cls.value_loss_exploded,
            "policy": cls.policy_diverged,
        }.get(name, cls.guard_exhausted)

    @property
    def succeeded(self) -> bool:
        """Whether the run ended as configured or as requested by the callback."""
        return self.exit_code == 0


# Stop reasons that are not caused by the training.
FROM_OUTSIDE = (StopReason.interrupted, StopReason.preempted, StopReason.time_limit)

# Stop reasons that promise a saved last state. Signals keep their names and exit codes, because job queues read them.
SAVED = (StopReason.completed, StopReason.target_reached, StopReason.stopped, StopReason.time_limit)


def stays_ended(fields: Mapping[str, Any], total_steps: int, target_return: float | None) -> bool:
    """Whether a seed of a resumed run of several is not trained further, by the fields of its `result.json`.

    A seed that was given up, by its guards or because it needs another program, can only continue alone.
    """
    stop_reason = StopReason.__members__.get(str(fields.get("stop_reason")))
    if stop_reason is StopReason.completed:
        return int(fields["step"]) >= total_steps
    if stop_reason is StopReason.target_reached:
        best = fields.get("best_return")
        return target_return is not None and best is not None and best >= target_return
    return stop_reason in GIVEN_UP


def nothing_to_train(reasons: Collection[StopReason], total_steps: int, target_return: float | None) -> str:
    """The line of a resumed run that has nothing left to train, by the stop reasons of its seeds."""
    parts = []
    if StopReason.completed in reasons:
        parts.append(f"all steps of total_steps={total_steps} are already trained; resume with total_steps=<more>")
    if StopReason.target_reached in reasons:
        target = f"eval.target_return={target_return}"
        parts.append(f"{target} is already reached; resume with eval.target_return=<more> or null")
    if any(reason in GIVEN_UP for reason in reasons):
        parts.append("a seed that was given up can only be resumed alone")
    return f"nothing to train: {', and '.join(parts)}"


GIVEN_UP = (
    StopReason.state_not_finite,
    StopReason.no_update_accepted,
    StopReason.physics_unstable,
    StopReason.value_loss_exploded,
    StopReason.policy_diverged,
    StopReason.policy_collapsed,
    StopReason.guard_exhausted,
    StopReason.recovery_exhausted,
    StopReason.needs_own_program,
)
