"""Learning curves of settings: mean and band over seeds that were evaluated at other steps or ended early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sweep_folders import add_result, add_run

from rlstable.report.sweep import read_sweep, settings_of
from rlstable.report.sweep_curves import Series, curves_of, mean_over_seeds


def series(curve: dict[float, float], ended: bool = True) -> Series:
    return Series(np.array(list(curve)), np.array(list(curve.values())), ended)


def test_curve_is_the_mean_over_seeds_with_a_band_from_the_least_to_the_greatest() -> None:
    (line,) = mean_over_seeds([series({0: 1.0, 10: 5.0}), series({0: 3.0, 10: 6.0})], "a", 2)
    assert (line.name, line.colour, line.dashed, line.x.tolist()) == ("a", 2, False, [0, 10])
    assert line.low is not None and line.high is not None
    assert (line.y.tolist(), line.low.tolist(), line.high.tolist()) == ([2.0, 5.5], [1.0, 5.0], [3.0, 6.0])


def test_seeds_evaluated_at_other_steps_are_interpolated_between_their_evaluations() -> None:
    solid, dashed = mean_over_seeds([series({0: 0.0, 10: 10.0}), series({5: 1.0, 15: 3.0})], "a", 0)
    assert (solid.x.tolist(), solid.y.tolist()) == ([5.0, 10.0], [3.0, 6.0])
    assert (dashed.x.tolist(), dashed.y.tolist()) == ([10.0, 15.0], [6.0, 6.5])  # the first seed keeps its 10


def test_seed_that_reached_its_target_early_keeps_counting_on_a_dashed_line() -> None:
    solid, dashed = mean_over_seeds([series({5: 100.0}), series({5: 10.0, 9: 20.0})], "a", 0)
    assert (solid.x.tolist(), solid.y.tolist(), solid.dashed) == ([5.0], [55.0], False)
    assert (dashed.x.tolist(), dashed.y.tolist(), dashed.dashed) == ([5.0, 9.0], [55.0, 60.0], True)
    assert dashed.name == "a, some ended"


def test_running_seed_is_left_out_beyond_its_last_evaluation() -> None:
    _, dashed = mean_over_seeds([series({5: 100.0}, ended=False), series({5: 10.0, 9: 20.0})], "a", 0)
    assert dashed.y.tolist() == [55.0, 20.0]


def test_seeds_without_a_common_step_have_only_a_dashed_line() -> None:
    (line,) = mean_over_seeds([series({1: 1.0, 2: 2.0}), series({3: 4.0})], "a", 0)
    assert (line.x.tolist(), line.y.tolist(), line.dashed) == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], True)


def test_curves_leave_out_evaluations_that_are_not_finite_and_runs_without_evaluations(tmp_path: Path) -> None:
    add_run(tmp_path / "0", {10: 1.0, 20: float("nan"), 30: 3.0})
    add_run(tmp_path / "1", {})
    for name in ("0", "1", "2"):  # the last one failed before it wrote its configuration
        add_result(tmp_path / name, ["a=1", f"seed={name}"], 3.0)
    add_result(tmp_path / "3", ["a=2"], None, "config_error")
    (line,) = curves_of(settings_of(read_sweep(tmp_path)), ["a"])
    assert (line.name, line.x.tolist(), line.y.tolist()) == ("a=1", [10.0, 30.0], [1.0, 3.0])


def test_last_evaluation_of_a_step_counts_after_a_rollback(tmp_path: Path) -> None:
    add_run(tmp_path / "0")
    rows = "".join(
        f'{{"step": {step}, "eval/episode_reward": {value}}}\n' for step, value in ((1, 1), (3, 9), (2, 2), (3, 3))
    )
    (tmp_path / "0" / "metrics.jsonl").write_text(rows)
    (line,) = curves_of(settings_of_one(tmp_path), [])
    assert (line.name, line.x.tolist(), line.y.tolist()) == ("mean of seeds", [1, 2, 3], [1, 2, 3])


def settings_of_one(sweep: Path):
    add_result(sweep / "0", [], 1.0)
    return settings_of(read_sweep(sweep))
