"""Rows and results of several seeds combined into one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlstable.policy.statistics import interquartile_mean
from rlstable.runner.aggregate import RowsOfSeeds, fields_of
from rlstable.runner.result import Row
from rlstable.supervise.stop_reasons import StopReason


def together(rows: list[Row], returns: list[float | None]) -> Row:
    own = RowsOfSeeds()
    for seed, row in enumerate(rows):
        own.add(seed, 0, row)
    found = own.combine(range(len(rows)), returns)
    assert found is not None
    return found


def test_rates_and_counts_are_summed_and_the_rest_is_the_mean() -> None:
    rows: list[Row] = [
        {"training/sps": 100.0, "guards/quarantine/trips": 3, "supervise/rollbacks": 1, "training/v_loss": 1.0},
        {"training/sps": 50.0, "guards/quarantine/trips": 0, "supervise/rollbacks": 0, "training/v_loss": 2.0},
    ]
    assert together(rows, [None, None]) == {
        "training/sps": 150.0, "guards/quarantine/trips": 3, "supervise/rollbacks": 1, "training/v_loss": 1.5,
        "seeds/training": 2,
    }  # fmt: skip


def test_means_leave_out_nan_infinity_and_none() -> None:
    rows: list[Row] = [{"a": float("nan"), "b": None}, {"a": 4.0, "b": float("inf")}, {"a": 6.0}]
    assert together(rows, []) == {"a": 5.0, "b": None, "seeds/training": 3}


def test_ended_seed_keeps_its_counts_in_the_row_but_not_its_rate() -> None:
    own = RowsOfSeeds()
    for seed in range(2):
        own.add(seed, 64, {"guards/storm/trips": 5, "training/sps": 10.0, "training/v_loss": float(seed)})
    assert own.combine([0, 1], [])["guards/storm/trips"] == 10  # type: ignore[index]
    own.add(0, 128, {"guards/storm/trips": 6, "training/sps": 12.0, "training/v_loss": 7.0})
    row = own.combine([0], [])
    assert row == {"guards/storm/trips": 11, "training/sps": 12.0, "training/v_loss": 7.0, "seeds/training": 1}


def test_counts_continue_after_a_resume() -> None:
    own = RowsOfSeeds()
    own.set_last(0, {"guards/storm/trips": 5, "guards/storm/share": 5, "training/v_loss": 9.0})
    own.set_last(1, {"guards/storm/trips": 1, "training/v_loss": 9.0})
    own.add(1, 64, {"guards/storm/trips": 2, "training/v_loss": 1.0})
    row = own.combine([1], [])
    assert row == {"guards/storm/trips": 7, "guards/storm/share": 5, "training/v_loss": 1.0, "seeds/training": 1}


def test_row_waits_for_seeds_that_log_in_other_iterations() -> None:
    """With rows at intervals, a seed that was rolled back logs in other iterations than the rest."""
    own = RowsOfSeeds()
    assert own.combine([0, 1], []) is None
    own.add(0, 64, {"a": 1.0})
    assert own.combine([0, 1], []) is None
    own.add(1, 128, {"a": 3.0})
    assert own.combine([0, 1], []) == {"a": 2.0, "seeds/training": 2}
    assert own.combine([0, 1], []) is None


@pytest.mark.parametrize("over", [True, False])
def test_last_row_and_row_with_an_evaluation_do_not_wait(over: bool) -> None:
    own = RowsOfSeeds()
    own.add(0, 64, {"a": 1.0} if over else {"eval/episode_reward": 1.0})
    assert own.combine([0, 1], [1.0], over) is not None


def test_return_of_an_ended_seed_stays_in_the_row() -> None:
    """Two of four were evaluated now, one ended long ago, and one was never evaluated."""
    rows: list[Row] = [{"eval/episode_reward": 10.0, "eval/sps": 1.0}, {"eval/episode_reward": 30.0, "eval/sps": 3.0}]
    row = together(rows, [10.0, 30.0, 80.0, None])
    assert row["eval/episode_reward"] == 40.0
    assert (row["seeds/return_min"], row["seeds/return_max"], row["seeds/return_iqm"]) == (10.0, 80.0, 40.0)
    assert row["eval/sps"] == 2.0


def test_row_without_an_evaluation_has_no_return() -> None:
    assert together([{"a": 1.0}], [5.0]) == {"a": 1.0, "seeds/training": 1}


def test_row_whose_evaluations_are_all_void_has_no_return() -> None:
    assert together([{"eval/episode_reward": None}], [None]) == {"eval/episode_reward": None, "seeds/training": 1}


def of_seed(code: int, name: str, value: float | None, **more: Any) -> dict[str, Any]:
    return {
        "stop_reason": name, "exit_code": code, "step": 10, "return": value, "best_return": value, "seconds": 1.0,
        "rollbacks": 2, **more,
    }  # fmt: skip


def test_result_of_a_fleet_has_the_worst_stop_reason() -> None:
    seeds = {
        3: of_seed(0, "completed", 4.0),
        4: of_seed(11, "needs_own_program", None, step=30, seconds=2.0),
        5: of_seed(0, "target_reached", 8.0),
    }
    fields = fields_of(seeds)
    assert (fields["stop_reason"], fields["exit_code"]) == ("needs_own_program", 11)
    assert (fields["step"], fields["seconds"], fields["rollbacks"]) == (30, 2.0, 6)
    assert (fields["return"], fields["best_return"]) == (6.0, 6.0)
    assert fields["seeds"] == seeds


def test_stop_reason_of_the_fleet_wins_over_that_of_one_seed() -> None:
    fields = fields_of({0: of_seed(5, "physics_unstable", None), 1: of_seed(1, "error", 2.0)}, StopReason.error)
    assert (fields["stop_reason"], fields["exit_code"]) == ("error", 1)


def test_signal_before_any_seed_exists_has_a_stop_reason() -> None:
    fields = fields_of({}, StopReason.preempted)
    assert (fields["stop_reason"], fields["step"], fields["return"], fields["seeds"]) == ("preempted", 0, None, {})


def test_confirmed_return_of_a_fleet_needs_that_of_every_seed_with_a_return() -> None:
    seeds = {0: of_seed(0, "completed", 4.0, confirmed_return=3.0), 1: of_seed(0, "completed", 8.0)}
    assert "confirmed_return" not in fields_of(seeds)
    seeds[1]["confirmed_return"] = 5.0
    seeds[2] = of_seed(5, "physics_unstable", None)
    assert fields_of(seeds)["confirmed_return"] == 4.0


def test_best_return_of_a_fleet_without_returns_is_none() -> None:
    assert fields_of({0: of_seed(5, "physics_unstable", None)})["best_return"] is None


@given(st.lists(st.floats(-1e6, 1e6) | st.none(), min_size=1, max_size=12))
def test_return_of_a_fleet_lies_among_those_of_its_seeds(values: list[float | None]) -> None:
    fields = fields_of({seed: of_seed(0, "completed", value) for seed, value in enumerate(values)})
    known = [value for value in values if value is not None]
    if not known:
        assert fields["return"] is None
    else:
        assert fields["return"] == pytest.approx(float(interquartile_mean(np.array(known))))
        assert min(known) - 1e-6 <= fields["return"] <= max(known) + 1e-6
