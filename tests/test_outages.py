"""Outages of disks, services and clocks: the run continues and no saved state is lost."""

from __future__ import annotations

import functools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import tiny_config

from rlstable.config import Config
from rlstable.io.run_folder import read_result, steps_in
from rlstable.io.services import Wandb
from rlstable.policy import load_policy
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
FULL, ROOM = 4, 10  # iterations at which the disk is filled and emptied again


def quick(**sections: Any) -> Config:
    """14 iterations, each saved and printed."""
    defaults: dict[str, Any] = {
        "guards": {}, "devices": 1, "total_steps": 14 * ITERATION, "eval": {"num_evals": 0},
        "logging": {"console": "plain"}, "checkpoint": {"every": 1, "keep": 2, "asynchronous": False},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def kinds(folder: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in (folder / "events.jsonl").read_text().splitlines() if line]


def same(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    """The run without an outage."""
    runner = TrainingLoop(quick(), tmp_path_factory.mktemp("healthy"))
    runner.run()
    return runner


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small disk is not permitted here: {getattr(error, 'stderr', error)}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            # A file may still grow to the end of its last page.
            for path in folder.glob("*.jsonl"):
                with path.open("ab") as lines:
                    lines.write(b"\n" * (-path.stat().st_size % 4096))


def run_on_a_full_disk(disk: Path, room: int | None, **sections: Any) -> TrainingLoop:
    def watch(step: int, _: Any) -> None:
        if step == FULL * ITERATION:
            runner.single.log.logbook.wait()  # until the row is written
            fill(disk)
        if room is not None and step == room * ITERATION:
            (disk / "filler").unlink()

    runner = TrainingLoop(quick(**sections), disk, watch)
    assert runner.run().stop_reason is (StopReason.not_saved if room is None else StopReason.completed)
    return runner


def test_run_on_a_full_disk_trains_to_its_end_and_keeps_its_checkpoints(
    disk: Path, healthy: TrainingLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_one = {"checkpoint": {"every": 1, "keep": 1, "asynchronous": False}}  # no old checkpoint that could be deleted
    runner = run_on_a_full_disk(disk, None, **keep_one)
    same(runner.single.state, healthy.single.state)
    printed = capsys.readouterr().out
    assert "checkpoint_failed: iteration 4, error " in printed
    assert "No space left on device" in printed
    assert "sink_failed: sink JsonLines, error OSError" in printed
    assert "stop reason  not_saved" in printed
    left = read_result(disk)  # written into reserved space
    assert left is not None and left["unsaved_steps"] == 11 * ITERATION
    assert "not_saved" in (disk / "report.html").read_text()
    assert steps_in(disk / "checkpoints") == [3]  # the fourth save failed
    assert load_policy(disk, "latest").host["host"]["iteration"] == 3
    (disk / "filler").unlink()
    again = TrainingLoop(quick(resume="auto"), disk)
    assert again.single.host.step == 3 * ITERATION
    again.run()
    same(again.single.state, healthy.single.state)
    rows = [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert rows == [ITERATION * n for n in range(1, 15)]


def test_run_saves_again_when_its_disk_has_room_again(
    disk: Path, healthy: TrainingLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    runner = run_on_a_full_disk(disk, ROOM)
    same(runner.single.state, healthy.single.state)
    assert steps_in(disk / "checkpoints") == [13, 14]
    told = kinds(disk)
    assert "sink_recovered" in told and "checkpoint_saved_again" in told and told[-1] == "stopped"
    left = read_result(disk)
    assert left is not None and left["stop_reason"] == "completed"
    assert capsys.readouterr().out.count("sink_failed") == 1
    rows = [json.loads(line)["step"] // ITERATION for line in (disk / "metrics.jsonl").read_text().splitlines() if line]
    assert rows[:FULL] == [1, 2, 3, 4] and rows[-4:] == [11, 12, 13, 14]


def test_unreachable_wandb_is_reported_and_does_not_stop_the_run(
    tmp_path: Path, healthy: TrainingLoop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights & Biases at a closed port, with a timeout of 2 s instead of 60 s."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # wandb reads its environment once per process, perhaps in another test
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr("rlstable.io.logbook.Wandb", functools.partial(Wandb, timeout=2.0))
    runner = TrainingLoop(quick(logging={"console": "plain", "wandb": {"mode": "online"}}), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    same(runner.single.state, healthy.single.state)
    [failed] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines() if "wandb" in line]
    assert (failed["kind"], failed["step"], failed["at"]) == ("wandb_failed", 0, "start")
    assert "127.0.0.1:9" in failed["error"] and "connection refused" in failed["error"]
    assert capsys.readouterr().out.count("wandb_failed: at start, error ") == 1
    wandb.teardown()


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0], ids=["back", "forth"])
def test_clock_that_is_changed_affects_only_logged_times(
    tmp_path: Path, healthy: TrainingLoop, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    def watch(step: int, _: Any) -> None:
        if step == FULL * ITERATION:
            runner.single.log.logbook.wait()  # the time of a row is when it is written
            clock, clock_ns = time.time, time.time_ns
            monkeypatch.setattr(time, "time", lambda: clock() + jump)
            monkeypatch.setattr(time, "time_ns", lambda: clock_ns() + int(jump * 1e9))

    off = {"enabled": False}
    config = quick(supervise={"recovery": off, "incident": off, "max_wall_time": 3600})
    runner = TrainingLoop(config, tmp_path, watch)
    began = time.monotonic()
    assert runner.run().stop_reason is StopReason.completed
    same(runner.single.state, healthy.single.state)
    assert 0 < runner.single.host.elapsed < time.monotonic() - began
    assert steps_in(tmp_path / "checkpoints") == [13, 14]
    assert load_policy(tmp_path, "latest").host["host"]["iteration"] == 14
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [ITERATION * n for n in range(1, 15)]
    assert rows[FULL]["time"] - rows[FULL - 1]["time"] == pytest.approx(jump, abs=600)
    assert all(0 < row["training/sps"] < 1e9 for row in rows)
    assert 0 <= rows[-1]["training/walltime"] - rows[0]["training/walltime"] < 600
