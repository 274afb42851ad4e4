"""Runs with too little memory divide the work, or end by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
from running import ITERATION, train
from saved import checkpoint, events, result, rows

from rlstable.runner.setup import Program
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
REFUSED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."


def fail(monkeypatch: pytest.MonkeyPatch, iterations: list[int] | None) -> None:
    """The device refuses memory in these iterations, once each, or in all."""
    each = Program.each

    def failing(self: Program, states: Any) -> Any:
        iteration = int(states[0].counters.iterations)
        if iterations is None or iteration in iterations:
            if iterations is not None:
                iterations.remove(iteration)
            jax.tree.map(lambda leaf: leaf.delete(), states)  # they were donated
            raise jax.errors.JaxRuntimeError(REFUSED)
        return each(self, states)

    monkeypatch.setattr(Program, "each", failing)


def plans(folder: Path) -> list[tuple[int, str]]:
    return [(event["step"] // ITERATION, event["plan"]) for event in events(folder, "memory_planned")]


@pytest.mark.parametrize("iteration", [0, 2])
def test_run_continues_with_smaller_parts_after_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """All iterations are saved, so nothing is lost, and it does not count as an attempt of recovery."""
    fail(monkeypatch, [iteration])
    assert train(tmp_path, recovery={}).stop_reason is StopReason.completed
    assert plans(tmp_path) == [(iteration, "gradient_accumulation 2")]
    assert result(tmp_path).get("rollbacks", 0) == 0
    assert [row["step"] for row in rows(tmp_path)] == [ITERATION * n for n in range(1, 9)]
    train(tmp_path, recovery={}, resume="auto", total_steps=9 * ITERATION)
    assert len(plans(tmp_path)) == 1 and checkpoint(tmp_path)[1]["plan"]["gradient_accumulation"] == 2


def test_device_that_always_refuses_memory_gets_fewer_environments_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, None)
    few = {"num_envs": 2, "batch_size": 2, "num_minibatches": 1}  # each plan compiles a program
    assert train(tmp_path, recovery={}, ppo=few).stop_reason is StopReason.out_of_memory
    assert plans(tmp_path)[-1][1].endswith("num_envs 1")


def test_out_of_memory_without_a_kept_state_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, [2])
    done = train(tmp_path)
    assert (done.stop_reason, done.step) == (StopReason.out_of_memory, 2 * ITERATION)
    assert "supervise.recovery.enabled=false" in result(tmp_path)["advice"]
