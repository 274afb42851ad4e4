"""A real disk of four megabytes that is full, and a read-only disk."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from disks import fill, mount

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.run_folder import open_run_dir

POLICY = {"w": np.ones(2, np.float32)}


def noise(seed: int) -> dict[str, np.ndarray]:
    """400 kB that cannot be compressed."""
    return {"x": np.random.default_rng(seed).random(50_000)}


def test_failing_saves_leave_nothing_on_stderr(disk, capfd):
    """Neither from the threads of orbax nor from asyncio."""
    with Checkpoints(disk, CheckpointConfig(keep=1, keep_best=0)) as checkpoints:
        checkpoints.save(1, noise(1), POLICY, {})
        checkpoints.wait()
        fill(disk)
        for i in (2, 3):
            assert not (checkpoints.save(i, noise(i), POLICY, {}) and checkpoints.wait())
    gc.collect()
    assert capfd.readouterr().err == ""


def test_failure_of_an_asynchronous_save_is_reported_without_waiting(disk):
    events: list[int] = []
    config = CheckpointConfig(every=1000)
    with Checkpoints(disk, config, lambda kind, fields: events.append(fields["checkpoint"])) as checkpoints:
        assert checkpoints.save(1, {"x": np.zeros(1)}, POLICY, {})
        assert checkpoints.wait()
        fill(disk)
        assert checkpoints.save(2, noise(2), POLICY, {})  # begun
        end = time.monotonic() + 60
        while not checkpoints.due(3) and time.monotonic() < end:
            time.sleep(0.01)
        assert events == [2]


@pytest.mark.parametrize("resume", [None, "auto"])
def test_run_on_a_full_disk_is_an_error_of_one_line(disk, resume):
    fill(disk)
    with pytest.raises(
        ConfigError, match=rf"^hydra\.run\.dir: cannot write to {disk}: No space left on device; choose"
    ):
        open_run_dir(disk, resume)
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_run_on_a_read_only_disk_is_an_error_of_one_line(disk):
    mount(disk, "remount,ro,size=4m")
    for folder in (disk, disk / "new"):
        with pytest.raises(ConfigError, match=rf"^hydra\.run\.dir: cannot write to {folder}: Read-only file system; "):
            open_run_dir(folder, None)
