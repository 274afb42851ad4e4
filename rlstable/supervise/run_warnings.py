"""Warnings: trouble that the stop reason does not name, for `result.json`, the console and the report page."""

from __future__ import annotations

from typing import NamedTuple

from rlstable.supervise.tally import Tally

LOSS_NOT_FINITE = "loss_not_finite"  # the warning of a run whose policy is ruined
_MOST = 0.5  # share of transitions


class RunWarning(NamedTuple):
    """A warning about a whole run.

    Attributes:
        name: Fixed name, for scripts.
        text: One sentence with the numbers and a first remedy.
    """

    name: str
    text: str


def warnings_of(tally: Tally) -> list[RunWarning]:
    """The warnings of a run, in a fixed order; empty for a healthy one."""
    candidates = (_loss(tally), _transitions(tally), _evaluations(tally), _return(tally))
    return [RunWarning(name, text) for name, text in candidates if text]


def _loss(tally: Tally) -> tuple[str, str]:
    text = (
        f"no finite loss since step {tally.finite_loss_step:,}, so the networks are ruined and this policy is of no "
        "use; train again with guards=default, and find the cause with python -m rlstable.doctor"
    )
    return LOSS_NOT_FINITE, "" if tally.loss_is_finite else text


def _transitions(tally: Tally) -> tuple[str, str]:
    name, latest = "transitions_rejected", sum(tally.latest) / max(len(tally.latest), 1)
    if tally.rejected <= _MOST * tally.transitions and latest <= _MOST:
        return name, ""
    most = [f"guards/{guard} ({count:,}, most for {tally.main_cause(guard)})" for guard, count in _rejecting(tally)]
    return name, (
        f"guards rejected {tally.rejected:,} of {tally.transitions:,} transitions, and {100.0 * latest:.0f} % of them "
        f"in the last {len(tally.latest)} iterations; most trips: {', '.join(most)}"
    )


def _evaluations(tally: Tally) -> tuple[str, str]:
    text = (
        f"all {tally.evaluations:,} evaluations were void: every episode was aborted or had no finite return, so "
        "checkpoints could not be compared; look at eval/aborted_share and run python -m rlstable.doctor"
    )
    return "evaluations_void", text if 0 < tally.void == tally.evaluations else ""


def _return(tally: Tally) -> tuple[str, str]:
    """The warning that no return was finite; not for a run that is too short for an episode to end."""
    expected = tally.ended > 0 or tally.evaluations > 0 or tally.rejected > _MOST * tally.transitions
    text = (
        "no episode had a finite return, neither in training nor in an evaluation, so it is unknown whether the "
        "policy learned anything; check rewards and observations with python -m rlstable.doctor"
    )
    never = tally.finite == 0 and tally.void == tally.evaluations and tally.loss_is_finite
    return "no_finite_return", text if expected and never else ""


def _rejecting(tally: Tally) -> list[tuple[str, int]]:
    return list(tally.tripped.items())[:2]
