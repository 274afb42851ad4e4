"""Disk space: free bytes, sizes of folders, and errors of a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# TensorStore reports a full disk as text, without an error number.
_FULL_TEXTS = ("RESOURCE_EXHAUSTED", os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))


def free_bytes(folder: Path) -> int | None:
    """Free bytes for this user on a folder's disk, or None if unknown. The folder need not exist."""
    for path in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(path)
            return status.f_bavail * status.f_frsize
    return None


def size_of(folder: Path) -> int:
    """Bytes of a folder on the disk, without files that are deleted meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def is_full(error: BaseException) -> bool:
    """Whether an error means that the disk or the user's quota is full."""
    return (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error) for text in _FULL_TEXTS)
