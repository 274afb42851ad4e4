"""What a profile is read as, and the profile of a run in miniature."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench
import kernels
from kernels import Kernel

from rlstable.compose import compose

TOY = (
    "env=import", "env.name=toys:PointMass", "env.episode_length=12", "ppo.num_envs=8", "ppo.batch_size=8",
    "ppo.num_minibatches=5", "ppo.num_updates_per_batch=3", "ppo.unroll_length=4", "seed=0", "devices=1",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
)  # fmt: skip


def ran(name: str, count: int, microseconds: float) -> list[dict[str, Any]]:
    return [{"ph": "X", "dur": microseconds, "args": {"hlo_op": name, "hlo_module": "jit_iteration"}}] * count


def test_an_operation_is_a_kernel_but_for_what_has_others_inside() -> None:
    events = [
        *ran("fusion.1", 3, 10.0), *ran("dot.2", 1, 100.0), *ran("while.7", 1, 1000.0), *ran("call", 2, 5.0),
        {"ph": "X", "dur": 7.0, "name": "somewhere on the host"}, {"ph": "M", "args": {"name": "a thread"}},
    ]  # fmt: skip
    assert kernels.kernels_of(events) == [
        Kernel("dot.2", 1, pytest.approx(100e-6)),
        Kernel("fusion.1", 3, pytest.approx(30e-6)),
    ]


@pytest.mark.parametrize(
    ("count", "part"),
    [(320, "step"), (640, "step"), (256, "minibatch"), (512, "minibatch"), (1280, "step"), (1, "rest")],
)
def test_a_part_is_told_by_how_often_it_ran(count: int, part: str) -> None:
    assert kernels.part_of(Kernel("k", count, 1.0), {"minibatch": 256, "step": 320}) == part


def test_the_table() -> None:
    measured = [
        Kernel("gemm", 24, 0.012),
        Kernel("adam", 12, 0.004),
        Kernel("physics", 10, 0.003),
        Kernel("gae", 1, 0.001),
    ]
    rows = [{"task": "ant", "times": {"minibatch": 12, "step": 10}, "kernels": [vars(kernel) for kernel in measured]}]
    section = kernels.section(rows)
    assert section.cells == [
        ("ant", "minibatch", "12", "3", "1,333", "0.80", "gemm 0.60, adam 0.20"),
        ("ant", "step", "10", "1", "300", "0.15", "physics 0.15"),
        ("ant", "rest", "1", "1", "1,000", "0.05", "gae 0.05"),
    ]


@pytest.mark.parametrize("task", kernels.TASKS)
def test_counts_tell_the_parts_apart(task: str) -> None:
    config = compose([*kernels.PARTS[task]])
    times = kernels.times_of(config)
    assert times["minibatch"] % times["step"] and times["step"] % times["minibatch"]


@pytest.mark.usefixtures("quick_compile")
def test_a_profile_in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.PARTS, "toy", TOY)
    row = kernels.run("toy", bench.Side)
    assert row["times"] == {"minibatch": 15, "step": 20}
    parts = {name for name, *_ in ((cells[1], cells[3]) for cells in kernels.section([row]).cells if cells[3] != "0")}
    assert parts == {"minibatch", "step", "rest"}
