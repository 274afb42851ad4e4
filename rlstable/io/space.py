"""Room on the disk of a run: how much is free, what a checkpoint takes, and which checkpoints may make way."""

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
    """Bytes that this user may still write where a folder is or will be; None if the system does not say."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize
    return None


def size_of(folder: Path) -> int:
    """Bytes that a folder takes on the disk; files that vanish meanwhile count nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
    return total


def is_full(error: BaseException) -> bool:
    """Whether an error of the disk or of a library says that the disk, or the user's quota, is full."""
    return (isinstance(error, OSError) and error.errno in _FULL) or any(text in str(error) for text in _FULL_TEXTS)


def over_quota(error: BaseException) -> bool:
    """Whether an error says that the user's quota is used up, of which the free bytes of a disk say nothing."""
    return (isinstance(error, OSError) and error.errno == errno.EDQUOT) or os.strerror(errno.EDQUOT) in str(error)


def dispensable(steps: Sequence[int], ranked: Sequence[int], config: CheckpointConfig) -> list[int]:
    """The checkpoints that may be deleted for a newer one, in the order in which they go.

    The newest one and the best one stay. Of the others those go first that were kept only as the latest, the oldest
    first, then those kept for their score, the worst first, and last those that `keep_period` keeps for good.

    Args:
        steps: Iterations of all checkpoints on disk, ascending.
        ranked: Those that have a score, the best first.
        config: What is kept.
    """
    worst_first = {step: place for place, step in enumerate(reversed(ranked))}

    def order(step: int) -> tuple[bool, int, int]:
        period = config.keep_period is not None and step % config.keep_period == 0
        return period, worst_first.get(step, -1), step

    return sorted((step for step in steps[:-1] if step not in ranked[:1]), key=order)


def enough(order: Sequence[int], sizes: Mapping[int, int], missing: int) -> list[int]:
    """The first of some checkpoints that together take as many bytes as are missing; empty if all are too little."""
    taken: list[int] = []
    for step in order:
        if missing <= 0:
            break
        taken.append(step)
        missing -= sizes[step]
    return taken if missing <= 0 else []
