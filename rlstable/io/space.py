"""Disk space: free bytes, sizes of checkpoints, and which checkpoints may be deleted."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstable.config.run import CheckpointConfig

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


def over_quota(error: BaseException) -> bool:
    """Whether an error means that the user's quota is full, which the free bytes of the disk do not show."""
    return (isinstance(error, OSError) and error.errno == errno.EDQUOT) or os.strerror(errno.EDQUOT) in str(error)


def dispensable(steps: Sequence[int], ranked: Sequence[int], config: CheckpointConfig) -> list[int]:
    """The checkpoints that may be deleted for a newer one, in order of deletion.

    The newest and the best checkpoint are never deleted. The others are deleted in this order: checkpoints without a
    score, the oldest first; checkpoints with a score, the worst first; checkpoints that `keep_period` keeps.

    Args:
        steps: Iterations of all checkpoints on disk, ascending.
        ranked: Checkpoints with a score, the best first.
        config: Which checkpoints are kept.
    """
    worst_first = {step: rank for rank, step in enumerate(reversed(ranked))}

    def order(step: int) -> tuple[bool, int, int]:
        period = config.keep_period is not None and step % config.keep_period == 0
        return period, worst_first.get(step, -1), step

    return sorted((step for step in steps[:-1] if step not in ranked[:1]), key=order)


def enough(order: Sequence[int], sizes: Mapping[int, int], missing: int) -> list[int]:
    """The first checkpoints that together free the missing bytes; empty if all together are too small."""
    chosen: list[int] = []
    for step in order:
        if missing <= 0:
            break
        chosen.append(step)
        missing -= sizes[step]
    return chosen if missing <= 0 else []
