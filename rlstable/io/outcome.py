"""The outcome of a run: the policy that it hands over, its return, and the best evaluation, from `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_MOST = 1e300


class Outcome(NamedTuple):
    """The policy that a run hands over, which is the policy that `load_policy` takes, and its return.

    Attributes:
        value: Return of the policy, the interquartile mean over several seeds.
        best: Greatest return of any evaluation of the run, never below `value`.
        confirmed: Whether `value` was measured in fresh episodes, which did not choose the policy.
        is_last: Whether the policy is the last state's.
        last: Return of the last state: in the fresh episodes if confirmed, else of the last evaluation.
        fallen: Whether the last state collapsed, so that the run replaced its policy by an earlier one.
    """

    value: float | None
    best: float | None
    confirmed: bool
    episodes: int | None
    iteration: int | None
    step: int | None
    is_last: bool
    last: float | None
    fallen: bool

    @property
    def return_text(self) -> str:
        """The return, how it was measured, and the best single evaluation if that is greater."""
        how = f" on {self.episodes:,} fresh episodes" if self.episodes is not None else ""
        text = _number(self.value)
        if self.value is not None:
            text += f", confirmed{how}" if self.confirmed else ", not confirmed"
        best = _number(self.best)
        return text if best == _number(self.value) else f"{text} (best single evaluation {best})"

    @property
    def policy_text(self) -> str | None:
        """Which state the run hands over, and the return of the last state if that is another one; None if unknown."""
        if self.iteration is None or self.step is None:
            return None
        which = f"iteration {self.iteration:,}, step {self.step:,}"
        if self.is_last:
            return f"the last state, {which}"
        if self.fallen:
            return f"{which}; the last state had fallen to {_number(self.last)}"
        if self.last is None:
            return f"{which}, not the last state"
        if self.confirmed:
            return f"{which}; the last saved state returned {_number(self.last)} in the same episodes"
        return f"{which}; the last evaluation returned {_number(self.last)}"


def outcome_of(result: Mapping[str, Any] | None) -> Outcome:
    result = result or {}
    confirmed, best = _finite(result.get("confirmed_return")), _finite(result.get("best_return"))
    value = _finite(result.get("return"))
    known = [number for number in (value, best) if number is not None]
    step = _whole(result.get("policy_step"))
    fallen = "fallen_return" in result
    last = result.get("fallen_return" if fallen else "last_return" if confirmed is None else "confirmed_last_return")
    return Outcome(
        value,
        max(known, default=None),
        confirmed is not None,
        _whole(result.get("confirmed_episodes")),
        _whole(result.get("policy_iteration")),
        step,
        result.get("policy_is_last") is True,
        _finite(last),
        fallen,
    )


def _finite(value: Any) -> float | None:
    # Also of an integer that has no float.
    return float(value) if isinstance(value, int | float) and -_MOST < value < _MOST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}"
