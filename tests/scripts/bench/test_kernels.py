"""Kernels read from a profile, and the profile of a tiny run."""

from __future__ import annotations

from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts.bench import kernels
from scripts.bench.side import Side

TOY = (
    "env=import", "ppo=default", "env.name=toys:PointMass", "env.episode_length=12", "ppo.num_envs=8",
    "ppo.batch_size=8",
    "ppo.num_minibatches=5", "ppo.num_updates_per_batch=3", "ppo.unroll_length=6", "seed=0", "devices=1",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
)  # fmt: skip


def kernel(name: str, count: int, seconds: Any, part: str) -> dict[str, Any]:
    return {"name": name, "count": count, "seconds": seconds, "part": part}


def ran(name: str, count: int, microseconds: float) -> list[dict[str, Any]]:
    return [{"ph": "X", "dur": microseconds, "args": {"hlo_op": name, "hlo_module": "jit_iteration"}}] * count


PROGRAM = """
%body.5 (arg: (f32[2])) -> (f32[2]) {
  %tanh.6 = f32[2]{0} tanh(%x)
}

ENTRY %main (a: f32[2]) -> f32[] {
  %while.7 = (f32[2]{0}) while(%t), condition=%c, body=%body.5, metadata={op_name="jit(iteration)/collect/while"}
  %fusion.1 = f32[2]{0} fusion(%a), metadata={op_name="jit(iteration)/learn/while/body/dot" stack_frame_id=1}
  ROOT %dot.2 = f32[] dot(%b, %c), metadata={op_name="jit(iteration)/collect/while/body/learning" stack_frame_id=2}
  %copy.3 = f32[2]{0} copy(%a)
"""


def test_every_operation_without_inner_operations_is_a_kernel() -> None:
    events = [
        *ran("fusion.1", 3, 10.0), *ran("dot.2", 1, 100.0), *ran("copy.3", 1, 1.0), *ran("tanh.6", 9, 2.0),
        *ran("while.7", 1, 1000.0), *ran("call", 2, 5.0), {"ph": "X", "dur": 7.0, "name": "somewhere on the host"},
        {"ph": "X", "dur": 9.0, "args": {"hlo_op": "fusion.1", "hlo_module": "jit_fold_in"}},
        {"ph": "M", "args": {"name": "a thread"}},
    ]  # fmt: skip
    assert kernels.kernels_of(events, PROGRAM) == [
        kernel("dot.2", 1, pytest.approx(100e-6), "collect"),
        kernel("fusion.1", 3, pytest.approx(30e-6), "learn"),
        kernel("tanh.6", 9, pytest.approx(18e-6), "collect"),
        kernel("copy.3", 1, pytest.approx(1e-6), "rest"),
    ]


def test_table_of_kernels_has_a_row_per_part() -> None:
    learning = [kernel("gemm", 24, 0.012, "learn"), kernel("adam", 12, 0.004, "learn")]
    others = [kernel("physics", 10, 0.003, "collect"), kernel("gae", 1, 0.001, "rest")]
    kept = [*learning, *others]
    rows = [{"task": "ant", "times": {"collect": 10, "learn": 12, "rest": 1}, "kernels": kept}]
    section = kernels.section(rows)
    assert section.cells == [
        ("ant", "collect", "10", "1", "300", "0.15", "physics 0.15"),
        ("ant", "learn", "12", "3", "1,333", "0.80", "gemm 0.60, adam 0.20"),
        ("ant", "rest", "1", "1", "1,000", "0.05", "gae 0.05"),
    ]


@pytest.mark.parametrize("task", kernels.TASKS)
def test_every_profiled_task_is_a_configuration(task: str) -> None:
    assert min(kernels.times_of(compose([*kernels.PARTS[task]])).values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_profile_of_a_tiny_run_has_kernels_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.PARTS, "toy", TOY)
    row = kernels.run("toy", Side)
    assert row["times"] == {"collect": 30, "learn": 15, "rest": 1}
    found = {cells[1]: int(cells[3].replace(",", "")) for cells in kernels.section([row]).cells}
    assert found["collect"] > 1 and found["learn"] > 10
    optimizer = [one for one in row["kernels"] if one["part"] == "learn" and one["count"] == 15]
    assert len(optimizer) > 5


@pytest.mark.slow
def test_incomplete_profile_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.PARTS, "toy", TOY)
    monkeypatch.setattr(kernels, "_MOST_EVENTS", 10)
    with pytest.raises(ConfigError, match="kernels: an iteration of toy has more events than the 10 "):
        kernels.run("toy", Side)
