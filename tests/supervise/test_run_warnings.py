"""Warnings of a run: exact sentences from its counts, none for a healthy run."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rlstable.runner.host_state import HostState
from rlstable.supervise.run_warnings import warnings_of
from rlstable.supervise.tally import Tally

NAN = float("nan")


def tally(*iterations: dict[str, Any], returns: tuple[float | None, ...] = ()) -> Tally:
    """Counts of iterations of 100 transitions and 4 minibatches; what an iteration does not say is healthy."""
    own = Tally()
    for iteration in iterations:
        trips = iteration.pop("trips", {})
        healthy = {"training/accepted_share": 1.0, "episode/length": 9.0, "episode/sum_reward": 3.0}
        own.count(healthy | iteration, trips, 100, 4, ("finite_update", "spike"), own.transitions + 100)
    for value in returns:
        own.count_evaluation(value)
    return own


def valid(share: float, **trips: dict[str, int]) -> dict[str, Any]:
    return {"training/valid_share": share, "trips": trips}


def names(own: Tally) -> list[str]:
    return [warning.name for warning in warnings_of(own)]


def test_healthy_run_has_no_warning() -> None:
    assert names(tally({}, {}, returns=(1.0, None))) == []


def test_most_transitions_rejected_is_said_with_counts_and_guards() -> None:
    bad = [valid(0.1, finite_samples={"reward": 88, "value": 2}, storm={"environments": 1}) for _ in range(3)]
    (warning,) = warnings_of(tally({}, *bad))
    assert warning.name == "transitions_rejected"
    assert warning.text == (
        "guards rejected 270 of 400 transitions, and 68 % of them in the last 4 iterations; most trips: "
        "guards/finite_samples (270, most for reward), guards/storm (3, most for environments)"
    )


def test_rejections_at_the_end_of_a_long_good_run_are_said() -> None:
    good, bad = [{} for _ in range(100)], [valid(0.0, quarantine={"physics": 100}) for _ in range(11)]
    assert names(tally(*good, *bad)) == ["transitions_rejected"]
    assert names(tally(*good, *bad[:10])) == []  # half of the last 20 iterations
    assert names(tally(*good, *bad, *good)) == []  # over, and most of the run was good


def test_loss_that_stays_not_finite_is_said_with_its_step_and_the_returns_beside_it_do_not_count() -> None:
    ruined = {"training/v_loss": NAN, "episode/sum_reward": 1000.0}
    (warning,) = warnings_of(tally({"training/v_loss": 1.0}, ruined, dict(ruined)))
    assert warning.name == "loss_not_finite" and warning.text.startswith("no finite loss since step 100, so ")
    assert names(tally(dict(ruined), {"training/v_loss": 1.0})) == []
    assert tally(dict(ruined)).finite == 0
    # A state guard has rejected the iteration, so the state before it is kept.
    rejected = Tally()
    values = {"training/accepted_share": 1.0, "training/v_loss": NAN}
    rejected.count(values, {}, 100, 4, (), 100, kept=False)
    assert "loss_not_finite" not in names(rejected)
    # Without an accepted update there is no loss, and the networks are as before.
    assert names(tally({"training/v_loss": NAN, "training/accepted_share": 0.0})) == []


def test_evaluations_without_a_finite_return_are_said() -> None:
    assert names(tally({}, returns=(None, NAN))) == ["evaluations_void"]
    (warning,) = warnings_of(tally({}, returns=(None, None, None)))
    assert warning.text.startswith("all 3 evaluations were void: every episode was aborted")


@pytest.mark.parametrize("returns", [(), (None,)])
def test_run_without_any_finite_return_is_said(returns: tuple[None, ...]) -> None:
    bad = {"episode/sum_reward": NAN}
    assert names(tally(bad, returns=returns)) == ["evaluations_void"] * len(returns) + ["no_finite_return"]
    assert "no_finite_return" not in names(tally(bad, {}, returns=returns))
    assert "no_finite_return" not in names(tally(bad, returns=(*returns, 1.0)))


def test_run_in_which_no_episode_could_end_is_healthy() -> None:
    unfinished = {"episode/length": NAN, "episode/sum_reward": NAN}
    assert names(tally(unfinished)) == []
    assert names(tally(unfinished | valid(0.9, quarantine={"reward": 10}))) == []
    mostly_bad = tally(unfinished | valid(0.1, quarantine={"reward": 10}))
    assert names(mostly_bad) == ["transitions_rejected", "no_finite_return"]


def test_minibatches_are_counted_by_what_rejected_them_if_no_update_was_accepted() -> None:
    none = {"training/accepted_share": 0.0}
    own = tally(
        {"limiters/kl/active": 0.5},
        none | {"limiters/kl/active": 0.75, "trips": {"finite_update": {"gradient": 1}}},
        none | {"limiters/kl/active": 1.0},
        none | {"limiters/kl/active": 0.0} | valid(0.0, quarantine={"reward": 100}),
    )
    assert own.lost == {"finite_update": 1.0, "limiters/kl": 7.0, "no valid sample": 4.0}
    assert own.limiters == {"limiters/kl": [2.25, 4]}


def test_counts_come_back_from_a_checkpoint() -> None:
    host = HostState(tally=tally(valid(0.0, quarantine={"reward": 100}), returns=(None,)))
    assert HostState.of(json.loads(json.dumps(dataclasses.asdict(host)))) == host
