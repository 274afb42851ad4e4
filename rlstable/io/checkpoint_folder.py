"""The folder of all checkpoints: renames and deletes replaced, retired, unfinished and damaged checkpoints."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.io.files import below
from rlstable.io.manifest import Damaged
from rlstable.io.run_folder import ASIDE

RETIRED = ".retired"
_DAMAGED = ".damaged"
_TEMPORARY = ".orbax-checkpoint-tmp"
_ATTEMPTS, _SECONDS_BETWEEN = 20, 0.05


def require_step(folder: Path, steps: list[int], iteration: int) -> None:
    """Checks that a folder has a checkpoint of an iteration.

    Raises:
        ConfigError: It has not; lists the checkpoints that exist.
    """
    if steps and iteration not in steps:
        listed = ", ".join(map(str, steps))
        raise ConfigError(f"{folder}: no checkpoint {iteration} here; choose best, latest or one of {listed}")


def keep_damaged(directory: Path, step: int) -> None:
    """Renames a damaged checkpoint, so that it is not restored but can still be examined."""
    name, n = f"{step}{_DAMAGED}", 1
    while (directory / name).exists():
        n += 1
        name = f"{step}{_DAMAGED}-{n}"
    (directory / str(step)).rename(directory / name)


def set_aside(directory: Path, steps: Sequence[int], by: int) -> None:
    """Renames checkpoints that a new one replaces, so that a crash before the new one is complete loses nothing."""
    for step in steps:
        (directory / str(step)).rename(directory / f"{step}{ASIDE}{by}")


def make_room_to_retire(directory: Path) -> None:
    """Creates the folder for retired checkpoints before a save, because the save may fill the disk."""
    (directory / RETIRED).mkdir(exist_ok=True)


def require_no_links(directory: Path) -> None:
    """Checks that neither the folder of all checkpoints nor an entry of it is a symbolic link.

    Raises:
        ConfigError: One of them is.
    """
    below(directory.parent, directory.name)
    if directory.is_dir():
        for entry in directory.iterdir():
            below(directory, entry.name)


def require_regular_files(checkpoint: Path) -> None:
    """Checks that a checkpoint has only folders and regular files: a link leads out of it, and a pipe has no end.

    Raises:
        Damaged: It has another file.
    """
    for parent, folders, files in os.walk(checkpoint):
        for name in (*folders, *files):
            mode = os.lstat(os.path.join(parent, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise Damaged(f"{name} is not a regular file")


def remove_unfinished(directory: Path) -> None:
    """Deletes the files of failed saves. Must not run during a save.

    TensorStore keeps writing for a moment after its first error, so this function tries several times.
    """
    require_no_links(directory)
    for _ in range(_ATTEMPTS):
        unfinished = list(directory.glob(f"*{_TEMPORARY}*"))
        if not unfinished:
            return
        for folder in unfinished:
            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_SECONDS_BETWEEN)


def settle(directory: Path) -> None:
    """Deletes retired and replaced checkpoints. If a new checkpoint is incomplete, restores the ones it would replace.

    A folder that cannot be deleted is harmless; the next call tries again.
    """
    require_no_links(directory)
    shutil.rmtree(directory / RETIRED, ignore_errors=True)
    for aside in directory.glob(f"*{ASIDE}*"):
        step, by = aside.name.split(ASIDE)
        if (directory / by).is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(directory / step)
