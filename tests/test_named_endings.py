"""Runs without recovery that fail after a good start end by name and keep their good checkpoints."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import GUARDS_OFF, tiny_config

from rlstable import load_policy
from rlstable.config import Config
from rlstable.guards.state import StormGuard
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
GOOD, PATIENCE = 2, 3


def short(**sections: Any) -> Config:
    """Up to 40 iterations, each saved."""
    defaults: dict[str, Any] = {
        "guards": {}, "devices": 1, "total_steps": 40 * ITERATION, "eval": {"num_evals": 0},
        "logging": {"console": "off"},
        "checkpoint": {"every": 1, "keep": 100, "asynchronous": False},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())


def fault(site: str, **fields: Any) -> dict[str, Any]:
    return {"site": site, "probability": 1.0, "start": GOOD} | fields


# By guard: the stop reason, its exit code, and the guards and fault of the run.
ENDINGS: dict[str, tuple[StopReason, int, dict[str, Any]]] = {
    "storm": (StopReason.physics_unstable, 5, {"guards": {"storm": {"patience": PATIENCE}}, "fault": fault("reward")}),
    "value_loss": (
        StopReason.value_loss_exploded, 6,
        {
            "guards": GUARDS_OFF | {"value_loss": {"enabled": True, "patience": PATIENCE}},
            "ppo": {"learning_rate": 3e-4},
            "fault": fault("learning_rate", value=1e5, start=PATIENCE),  # not judged before
        },
    ),
    "policy": (
        StopReason.policy_diverged, 7,
        {
            "guards": GUARDS_OFF | {"policy": {"enabled": True, "patience": PATIENCE}},
            "ppo": {"learning_rate": 3e-4},
            "fault": fault("learning_rate", value=1e4),
        },
    ),
    "finite_state": (
        StopReason.state_not_finite, 3,
        {"guards": GUARDS_OFF | {"finite_state": {"enabled": True, "patience": PATIENCE}}, "fault": fault("gradient")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("guard", ENDINGS)
def test_guard_whose_patience_ends_ends_the_run_by_name(tmp_path: Path, guard: str) -> None:
    """After `patience` iterations; the latest checkpoint is the last good one and can be resumed."""
    ending, code, sections = ENDINGS[guard]
    good = sections["fault"]["start"]
    result = TrainingLoop(short(**sections), tmp_path).run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (ending, code)
    assert result.step == (good + PATIENCE) * ITERATION
    assert result.history[-1][f"guards/{guard}/trips"] == PATIENCE
    left = read_result(tmp_path)
    assert left is not None
    assert (left["stop_reason"], left["exit_code"]) == (ending.name, code)
    assert saved(tmp_path) == [*range(1, good + 1)]
    action = load_policy(tmp_path).act(np.zeros(4, np.float32))
    assert np.isfinite(action).all()
    again = TrainingLoop(short(**sections, resume="auto"), tmp_path)
    assert again.single.host.step == good * ITERATION
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again.single.state.params))


def test_storm_shorter_than_the_patience_does_not_end_the_run(tmp_path: Path) -> None:
    """Patience counts trips in a row: a storm of two iterations is no storm of three."""
    sections = {"guards": {"storm": {"patience": PATIENCE}}, "fault": fault("reward", iterations=PATIENCE - 1)}
    result = TrainingLoop(short(**sections, total_steps=8 * ITERATION), tmp_path).run()
    assert result.stop_reason is StopReason.completed
    assert result.history[-1]["guards/storm/trips"] == PATIENCE - 1
    assert saved(tmp_path) == [1, 2, 5, 6, 7, 8]  # without the iterations of the storm


def test_run_that_accepts_no_update_ends_by_name(tmp_path: Path) -> None:
    """Every gradient is NaN and every update is rejected; the saved states are good."""
    sections = {"guards": {"finite_update": {"patience": PATIENCE}}, "fault": fault("gradient")}
    result = TrainingLoop(short(**sections), tmp_path).run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.no_update_accepted, 4)
    assert result.step == (GOOD + PATIENCE) * ITERATION
    assert result.history[-1]["guards/finite_update/trips"] == PATIENCE * 4
    assert result.history[-1]["training/updates"] == GOOD * 4
    assert saved(tmp_path)[: GOOD + 1] == [1, 2, 3]
    assert np.isfinite(load_policy(tmp_path).act(np.zeros(4, np.float32))).all()


def test_patience_counts_iterations_across_a_resume(tmp_path: Path) -> None:
    """Iterations without an update before the resume count as well."""
    sections = {"guards": {"finite_update": {"patience": PATIENCE}}, "fault": fault("gradient")}
    TrainingLoop(short(**sections), tmp_path, lambda step, _: step == (GOOD + 1) * ITERATION).run()
    result = TrainingLoop(short(**sections, resume="auto"), tmp_path).run()
    assert (result.stop_reason, result.step) == (StopReason.no_update_accepted, (GOOD + PATIENCE) * ITERATION)


def test_reset_pool_is_refilled_only_if_it_was_drawn_from(tmp_path: Path) -> None:
    """A healthy run never draws from its pool; the first fault makes the next refill due."""
    env = {"name": "toys:PointMass", "reset_pool_refresh": 2, "reset_pool_size": 8}
    sections = {"env": env, "fault": fault("reward", probability=0.05, iterations=1)}
    pools: list[np.ndarray] = []

    def look(*_: Any) -> None:  # called before the refill of the same iteration
        pools.append(np.asarray(runner.single.state.reset_pool.matrices["float32"]))

    runner = TrainingLoop(short(**sections, total_steps=8 * ITERATION), tmp_path, look)
    result = runner.run()
    assert result.history[-1]["guards/quarantine/trips"] > 0
    same = [bool(np.array_equal(a, b)) for a, b in itertools.pairwise(pools)]
    # The fault is in the third iteration and the refill after the fourth, so only the fifth sees another pool.
    assert same == [True, True, True, False, True, True, True]
    assert runner.single.host.pool_used is False


def test_resume_between_a_draw_and_its_refill_is_exact(tmp_path: Path) -> None:
    env = {"name": "toys:PointMass", "reset_pool_refresh": 2, "reset_pool_size": 8}
    sections = {"env": env, "fault": fault("reward", probability=0.05), "total_steps": 6 * ITERATION}
    whole = TrainingLoop(short(**sections), tmp_path / "whole")
    whole.run()
    parts = TrainingLoop(short(**sections), tmp_path / "parts", lambda step, _: step == 3 * ITERATION)
    parts.run()
    assert parts.single.host.pool_used is True
    resumed = TrainingLoop(short(**sections, resume="auto"), tmp_path / "parts")
    assert resumed.single.host.pool_used is True and resumed.single.host.step == 3 * ITERATION
    resumed.run()
    for ours, theirs in zip(jax.tree.leaves(resumed.single.state), jax.tree.leaves(whole.single.state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_run_without_guards_has_no_reset_pool(tmp_path: Path) -> None:
    env = {"name": "toys:PointMass", "reset_pool_refresh": 1}
    runner = TrainingLoop(short(guards=GUARDS_OFF, env=env, total_steps=2 * ITERATION), tmp_path)
    runner.run()
    assert runner.single.state.reset_pool is None
    assert runner.single.host.pool_used is False


def test_custom_state_guard_ends_a_run_by_its_patience(tmp_path: Path) -> None:
    """With the stop reason of custom guards; a state that the guard rejects is not saved."""
    never = StormGuard(PATIENCE, -1.0)  # rejects even a batch without a bad sample
    runner = TrainingLoop(short(), tmp_path, more_guards={"state": {"never": never}})
    result = runner.run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.guard_exhausted, 8)
    assert runner.single.host.iteration == PATIENCE
    assert not (tmp_path / "checkpoints").exists()
    assert result.history[-1]["guards/never/environments"] == PATIENCE
