"""Choice of the checkpoints that are deleted for a newer one on a full disk."""

from __future__ import annotations

import errno
import os

import pytest

from rlstable.config.run import CheckpointConfig
from rlstable.io.space import dispensable, enough, free_bytes, is_full, over_quota, size_of


def test_newest_and_best_checkpoint_are_never_deleted_for_space():
    config = CheckpointConfig(keep_period=100)
    # Those kept as the latest only, then the scored ones from the worst on, then those kept for good.
    assert dispensable([100, 110, 120, 130, 140, 150], [130, 110, 120], config) == [140, 120, 110, 100]
    assert dispensable([1], [], config) == dispensable([], [], config) == []
    assert dispensable([1, 2], [2, 1], config) == [1]
    assert dispensable([1, 2], [1], config) == []


def test_as_few_checkpoints_as_possible_are_deleted_for_space():
    sizes = {1: 10, 2: 20, 3: 30}
    assert enough([1, 2, 3], sizes, 10) == [1]
    assert enough([1, 2, 3], sizes, 11) == [1, 2]
    assert enough([1, 2, 3], sizes, 61) == []
    assert enough([1, 2, 3], sizes, 0) == []


@pytest.mark.parametrize(
    ("error", "full", "quota"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True, False),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True, True),
        (ValueError('RESOURCE_EXHAUSTED: Error writing "x" in OCDBT database'), True, False),
        (ValueError("Error writing: Disk quota exceeded"), True, True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False, False),
    ],
)
def test_errors_of_a_full_disk_are_recognised(error, full, quota):
    assert (is_full(error), over_quota(error)) == (full, quota)


def test_free_space_of_a_missing_folder_is_that_of_its_parent(tmp_path):
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.2)
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert 100_000 <= size_of(tmp_path) <= 110_000
