"""The outcome of a run: sentences from made-up results, and a best that is never below the return."""

from __future__ import annotations

from typing import Any

import pytest

from rlstable.io.outcome import outcome_of

EVALUATED = {"step": 600, "return": 20.0, "best_return": 20.0, "last_return": 12.0}
FRESH = {"confirmed_return": 15.0, "return": 15.0, "confirmed_episodes": 32, "confirmed_last_return": 11.0}
LAST = {"policy_iteration": 60, "policy_step": 600, "policy_is_last": True}
EARLIER = {"policy_iteration": 46, "policy_step": 460, "policy_is_last": False}
OF_ANOTHER_ATTEMPT = LAST | {"policy_is_last": False}


@pytest.mark.parametrize(
    ("result", "return_text", "policy_text"),
    [
        (None, "none", None),
        ({"step": 0}, "none", None),
        ({**EVALUATED, "return": float("nan"), "best_return": None}, "none", None),
        ({**EVALUATED, **LAST, "last_return": 20.0}, "20.0, not confirmed", "the last state, iteration 60, step 600"),
        ({**EVALUATED, **EARLIER}, "20.0, not confirmed",
         "iteration 46, step 460; the last evaluation returned 12.0"),
        ({**EVALUATED, **OF_ANOTHER_ATTEMPT}, "20.0, not confirmed",
         "iteration 60, step 600; the last evaluation returned 12.0"),
        ({**EVALUATED, **EARLIER, "last_return": None}, "20.0, not confirmed",
         "iteration 46, step 460, not the last state"),
        ({**EVALUATED, **EARLIER, "return": 18.0}, "18.0, not confirmed (best single evaluation 20.0)",
         "iteration 46, step 460; the last evaluation returned 12.0"),
        ({**EVALUATED, **EARLIER, **FRESH}, "15.0, confirmed on 32 fresh episodes (best single evaluation 20.0)",
         "iteration 46, step 460; the last saved state returned 11.0 in the same episodes"),
        ({**EVALUATED, **LAST, **FRESH, "confirmed_last_return": 15.0},
         "15.0, confirmed on 32 fresh episodes (best single evaluation 20.0)",
         "the last state, iteration 60, step 600"),
        ({**EVALUATED, **EARLIER, **FRESH, "return": 1893.0, "confirmed_return": 1893.0, "fallen_return": 1549.0},
         "1,893.0, confirmed on 32 fresh episodes",
         "iteration 46, step 460; the last state had fallen to 1,549.0"),
        ({**EVALUATED, **EARLIER, "fallen_return": None}, "20.0, not confirmed",
         "iteration 46, step 460; the last state had fallen to none"),
    ],
)  # fmt: skip
def test_outcome_names_the_return_and_the_policy_that_is_handed_over(
    result: dict[str, Any] | None, return_text: str, policy_text: str | None
) -> None:
    outcome = outcome_of(result)
    assert (outcome.return_text, outcome.policy_text) == (return_text, policy_text)


@pytest.mark.parametrize("confirmed", [None, 1.0, 30.0])
def test_best_is_never_below_the_return(confirmed: float | None) -> None:
    record = {} if confirmed is None else {"confirmed_return": confirmed, "return": confirmed}
    outcome = outcome_of(EVALUATED | record)
    assert outcome.best is not None and outcome.value is not None and outcome.best >= outcome.value
