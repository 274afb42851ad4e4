"""Advice of a run that gives up follows what was active in its own metrics."""

from __future__ import annotations

from typing import Any

import pytest

from rlstable.supervise.advice import paragraph
from rlstable.supervise.recovery import Attempts
from rlstable.supervise.stop_reasons import StopReason
from rlstable.supervise.tally import Tally

IDLE = {"training/accepted_share": 0.0}


def tally(values: dict[str, Any], trips: dict[str, dict[str, int]] | None = None, times: int = 1) -> Tally:
    own = Tally()
    for _ in range(times):
        own.count(IDLE | values, trips or {}, 100, 4, ("finite_update", "spike"), own.transitions + 100)
    return own


def advice(cause: StopReason, own: Tally) -> str:
    return paragraph(cause, Attempts(), {}, own)


def test_advice_names_the_limiter_that_rejected_every_update() -> None:
    own = tally({"limiters/kl/active": 1.0}, times=3)
    assert advice(StopReason.no_update_accepted, own) == (
        "no update was accepted for guards.finite_update.patience iterations in a row, or in the whole run. "
        "Updates were rejected by limiters/kl (100%). Every update moved the policy further than guards.limiters.kl "
        "allows: divide ppo.learning_rate by 100 or more."
    )


@pytest.mark.parametrize("name", ["finite_update", "spike"])
def test_advice_names_the_guard_that_rejected_most_updates(name: str) -> None:
    text = advice(
        StopReason.no_update_accepted,
        tally({"limiters/kl/active": 0.25}, {name: {"gradient": 3}, "finite_state": {"x": 9}}),
    )
    assert f"Updates were rejected by guards/{name} (75%) and limiters/kl (25%)." in text
    assert "divide ppo.learning_rate by 10" in text.replace("Divide", "divide")


def test_advice_names_the_guard_that_left_no_sample_to_learn_from() -> None:
    own = tally({"training/valid_share": 0.0}, {"finite_samples": {"reward": 100}, "storm": {"environments": 1}})
    text = advice(StopReason.no_update_accepted, own)
    assert "Updates were rejected by guards/finite_samples, which left no valid sample (100%)." in text
    assert text.endswith("lower ppo.reward_scaling so that a good step earns about 1.")


def test_storm_of_scaled_rewards_is_not_blamed_on_the_simulation() -> None:
    rewards = {"training/valid_share": 0.0}, {"finite_samples": {"reward": 100}, "storm": {"environments": 1}}
    text = advice(StopReason.physics_unstable, tally(*rewards))
    assert (
        "Most active were guards/finite_samples (100 trips, most for reward), guards/storm (1 trip, most for "
        "environments)." in text
    )
    assert "ppo.reward_scaling" in text and "simulation becomes unstable" not in text
    physics = {"training/valid_share": 0.0}, {"quarantine": {"physics": 90, "reward": 10}}
    assert "The simulation becomes unstable" in advice(StopReason.physics_unstable, tally(*physics))


def test_advice_names_busy_limiters_beside_guards() -> None:
    own = tally({"limiters/gradient_norm/active": 0.9, "limiters/kl/active": 0.1}, {"policy": {"distance": 2}})
    text = advice(StopReason.policy_diverged, own)
    assert (
        "Most active were guards/policy (2 trips, most for distance), limiters/gradient_norm (90% of the time)." in text
    )


def test_advice_names_the_guard_that_ended_the_run_first() -> None:
    own = tally({}, {"spike": {"spike": 900}, "finite_samples": {"value": 800}, "policy": {"kl": 5}})
    text = advice(StopReason.policy_diverged, own)
    assert (
        "Most active were guards/policy (5 trips, most for kl), guards/spike (900 trips, most for spike). Lower "
        "ppo.learning_rate, set guards.limiters.kl=0.3 or" in text
    )


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("std_exploded", "beyond guards.policy.max_std: lower ppo.entropy_cost, guards.limiters.policy_std_max or"),
        ("std_collapsed", "below guards.policy.min_std or min_entropy: raise ppo.entropy_cost or"),
        ("entropy_collapsed", "below guards.policy.min_std or min_entropy: raise ppo.entropy_cost or"),
    ],
)
def test_advice_on_a_diverged_policy_follows_the_quantity_that_left_its_bounds(cause: str, remedy: str) -> None:
    text = advice(StopReason.policy_diverged, tally({}, {"policy": {cause: 5, "kl": 1}}))
    assert remedy in text and "guards.limiters.kl" not in text


def test_advice_without_counts_is_that_of_the_ending() -> None:
    assert "Most active" not in advice(StopReason.policy_diverged, Tally())
    assert "rejected by" not in advice(StopReason.no_update_accepted, Tally())
