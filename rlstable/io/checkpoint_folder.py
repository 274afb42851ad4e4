"""The folder of all checkpoints: which are superseded, retired, unfinished or damaged, and which may make way."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io.run_folder import ASIDE, steps_in
from rlstable.io.space import dispensable, enough, size_of

RETIRED = ".retired"
_DAMAGED = ".damaged"
_TEMPORARY = ".orbax-checkpoint-tmp"
_LOOKS, _BETWEEN_LOOKS = 20, 0.05  # seconds


def require_step(folder: Path, steps: list[int], iteration: int) -> None:
    """Checks that an iteration is among the steps of a folder.

    Raises:
        ConfigError: It is not; names those that are.
    """
    if steps and iteration not in steps:
        listed = ", ".join(map(str, steps))
        raise ConfigError(f"{folder}: no checkpoint {iteration} here; choose best, latest or one of {listed}")


def keep_damaged(directory: Path, step: int) -> None:
    """Renames a damaged checkpoint, so that it is out of the way and can still be examined."""
    name, n = f"{step}{_DAMAGED}", 1
    while (directory / name).exists():
        n += 1
        name = f"{step}{_DAMAGED}-{n}"
    (directory / str(step)).rename(directory / name)


def set_aside(directory: Path, steps: Sequence[int], by: int) -> None:
    """Renames steps that a new one supersedes, so that a crash before it is complete loses neither."""
    for step in steps:
        (directory / str(step)).rename(directory / f"{step}{ASIDE}{by}")


def make_room_to_retire(directory: Path) -> None:
    """Makes the folder for what a save retires, which may be impossible once that save has filled the disk."""
    (directory / RETIRED).mkdir(exist_ok=True)


def retire(directory: Path, steps: Iterable[int]) -> None:
    """Deletes whole checkpoints; renamed first, so that a crash leaves no half of one under its number."""
    make_room_to_retire(directory)
    for step in steps:
        (directory / str(step)).rename(directory / RETIRED / str(step))
    shutil.rmtree(directory / RETIRED, ignore_errors=True)


def unfinished_size(directory: Path) -> int:
    """Bytes that saves have written that are not complete."""
    return sum(map(size_of, directory.glob(f"*{_TEMPORARY}*")))


def remove_unfinished(directory: Path) -> None:
    """Deletes what failed saves have left; not while one is under way.

    TensorStore keeps writing for a moment after the error of its first file, so this looks more than once.
    """
    for _ in range(_LOOKS):
        found = list(directory.glob(f"*{_TEMPORARY}*"))
        if not found:
            return
        for left in found:
            shutil.rmtree(left, ignore_errors=True)
        time.sleep(_BETWEEN_LOOKS)


def settle(directory: Path) -> None:
    """Deletes what was retired or superseded by a complete checkpoint, brings back what an incomplete one was to.

    A folder that cannot be deleted does no harm; the next call tries again.
    """
    shutil.rmtree(directory / RETIRED, ignore_errors=True)
    for aside in directory.glob(f"*{ASIDE}*"):
        step, by = aside.name.split(ASIDE)
        if (directory / by).is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(directory / step)


def thin(directory: Path, best: Sequence[int], config: CheckpointConfig, begun: int, free: int) -> list[int]:
    """Deletes older checkpoints if that makes room for one more.

    Args:
        directory: That of all checkpoints.
        best: Those that have a score, the best first.
        config: What is kept.
        begun: Bytes that a save had written before it failed.
        free: Bytes that are free now.

    Returns:
        The checkpoints that were deleted.
    """
    steps = steps_in(directory)
    sizes = {step: size_of(directory / str(step)) for step in steps}
    needed = max([2 * begun, *(size + size // 10 for size in sizes.values())])
    deleted = enough(dispensable(steps, best, config), sizes, needed - free)
    if deleted:
        retire(directory, deleted)
    return deleted
