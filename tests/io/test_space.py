"""Free space, sizes and errors of a full disk."""

from __future__ import annotations

import errno
import os

import pytest

from rlstable.io.space import free_bytes, is_full, size_of


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (ValueError('RESOURCE_EXHAUSTED: Error writing "x" in OCDBT database'), True),
        (ValueError("Error writing: Disk quota exceeded"), True),
        (OSError(errno.EIO, os.strerror(errno.EIO)), False),
    ],
)
def test_errors_of_a_full_disk_are_recognised(error, full):
    assert is_full(error) == full


def test_free_space_of_a_missing_folder_is_that_of_its_parent(tmp_path):
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(free_bytes(tmp_path), rel=0.2)
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert 100_000 <= size_of(tmp_path) <= 110_000
