"""The outcome of a run: the policy that it hands over, its return, and the best evaluation, from `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_MOST = 1e300


class Outcome(NamedTuple):
    """The policy that a run hands over, which is the policy that `load_policy` takes, and its return."""

    value: float | None  # return of the policy, the interquartile mean over several seeds
    best: float | None  # greatest return of any evaluation of the run, never below `value`
    measured: str  # how the return was measured: in fresh episodes, which did not choose the policy, or not
    policy_text: str | None  # which state the run hands over, and the return of the last state if that is another one

    @property
    def return_text(self) -> str:
        """The return, how it was measured, and the best single evaluation if that is greater."""
        text, best = _number(self.value), _number(self.best)
        extra = "" if best == text else f" (best single evaluation {best})"
        return (text if self.value is None else f"{text}, {self.measured}") + extra


def outcome_of(result: Mapping[str, Any] | None) -> Outcome:
    result = result or {}
    value, best = _finite(result.get("return")), _finite(result.get("best_return"))
    known = [number for number in (value, best) if number is not None]
    confirmed = _finite(result.get("confirmed_return")) is not None
    episodes = _whole(result.get("confirmed_episodes"))
    measured = "not confirmed"
    if confirmed:
        measured = "confirmed" if episodes is None else f"confirmed on {episodes:,} fresh episodes"
    return Outcome(value, max(known, default=None), measured, _policy_text(result, confirmed))


def _policy_text(result: Mapping[str, Any], confirmed: bool) -> str | None:
    iteration, step = _whole(result.get("policy_iteration")), _whole(result.get("policy_step"))
    if iteration is None or step is None:
        return None
    which = f"iteration {iteration:,}, step {step:,}"
    if result.get("policy_is_last") is True:
        return f"the last state, {which}"
    if "fallen_return" in result:
        return f"{which}; the last state had fallen to {_number(_finite(result['fallen_return']))}"
    last = _finite(result.get("confirmed_last_return" if confirmed else "last_return"))
    if last is None:
        return f"{which}, not the last state"
    if confirmed:
        return f"{which}; the last saved state returned {_number(last)} in the same episodes"
    return f"{which}; the last evaluation returned {_number(last)}"


def _finite(value: Any) -> float | None:
    # Also of an integer that has no float.
    return float(value) if isinstance(value, int | float) and -_MOST < value < _MOST else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.1f}"
