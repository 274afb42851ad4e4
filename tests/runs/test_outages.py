"""Full disks: the run continues and no saved state is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import fill
from running import ITERATION, config
from saved import checkpoint, events, lines, require_same_checkpoint, result, rows, saved

from rlstable import load_policy
from rlstable.listeners import listeners_of
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
FULL, ROOM, LAST = 4, 10, 14  # iterations at which the disk is filled and emptied again, and the run ends


def run(folder: Path, callback: Any = None, keep: int = 2, **sections: Any) -> StopReason:
    """Saves and prints every iteration."""
    saves = {"every": 1, "keep": keep, "asynchronous": False}
    own = {"total_steps": LAST * ITERATION, "checkpoint": saves, "logging": {"console": "lines"}}
    settings = config(**own | sections)
    listeners = listeners_of(settings.render, settings.logging)
    return TrainingLoop(settings, folder, callback, listeners=listeners).run().stop_reason


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run without an outage."""
    folder = tmp_path_factory.mktemp("healthy")
    run(folder)
    return folder


def wait_for_row(folder: Path, row: int) -> None:
    while len(lines(folder / "metrics.jsonl")) < row:
        time.sleep(0.01)


def fill_and_empty(disk: Path, room: int | None = None) -> Any:
    def watch(step: int, _: Any) -> None:
        if step == FULL * ITERATION:
            wait_for_row(disk, FULL)
            fill(disk)
        if room is not None and step == room * ITERATION:
            (disk / "filler").unlink()

    return watch


def test_run_on_a_full_disk_trains_to_its_end_and_keeps_its_checkpoints(
    disk: Path, healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # With one checkpoint there is no old one that could be deleted.
    assert run(disk, fill_and_empty(disk), keep=1) is StopReason.not_saved
    printed = capsys.readouterr().out
    assert "checkpoint_failed: checkpoint 4, error " in printed and "No space left on device" in printed
    assert "sink_failed: sink JsonLines, error OSError" in printed
    assert "stop reason  not_saved" in printed and f"not saved    the last {11 * ITERATION} steps" in printed
    assert result(disk)["advice"].startswith(f"Make room on the disk of {disk}, or check its permissions; then ")
    assert result(disk)["unsaved_steps"] == 11 * ITERATION  # written into reserved space
    assert "not_saved" in (disk / "report.html").read_text()
    assert saved(disk) == [3]  # the fourth save failed
    assert load_policy(disk, "latest").host["host"]["iteration"] == 3
    (disk / "filler").unlink()
    assert run(disk, resume="auto") is StopReason.completed and "unsaved_steps" not in result(disk)
    require_same_checkpoint(checkpoint(disk), checkpoint(healthy))
    assert rows(disk) == rows(healthy)


def test_run_saves_again_when_its_disk_has_room_again(
    disk: Path, healthy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(disk, fill_and_empty(disk, ROOM)) is StopReason.completed
    arrays = checkpoint(healthy)[0]
    for path, array in checkpoint(disk)[0].items():
        np.testing.assert_array_equal(array, arrays[path])
    assert saved(disk) == [13, 14]
    told = [event["kind"] for event in events(disk)]
    assert "sink_recovered" in told and "checkpoint_saved_again" in told and told[-1] == "stopped"
    assert capsys.readouterr().out.count("sink_failed") == 1
    logged = [row["step"] // ITERATION for row in rows(disk)]
    assert logged[:FULL] == [1, 2, 3, 4] and logged[-4:] == [11, 12, 13, 14]
