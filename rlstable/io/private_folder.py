"""Folders whose files are executed: checks that no other user can write or replace them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ROOT = 0


def user_id() -> int:
    """The number of the user who runs this process; 0 on systems without user numbers."""
    return os.getuid() if hasattr(os, "getuid") else 0


def make_private(folder: Path) -> None:
    """Makes a folder and its missing parents, all with mode 0700 whatever the umask is.

    Raises:
        OSError: The folder cannot be made, or a file has its name.
    """
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)  # another process may make the same folder


def exposed_to_others(found: os.stat_result) -> bool:
    """Whether another user owns a file or folder, or may write to it; False on systems without user numbers."""
    if not hasattr(os, "getuid"):
        return False
    return found.st_uid != os.getuid() or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def writable_by_others(folder: Path) -> str | None:
    """Why another user could write a folder's files, as one line; None if only this user (and root) can.

    Symbolic links are resolved first. The folder itself must belong to this user, without write permission for group
    or others. Each parent must belong to this user or to root. A parent that its group or others may write to must
    have the sticky bit, as `/tmp` has: without it another user can put another folder under the same name. This user's
    own group may write to a parent, since some systems make every folder of a home that way (umask 002).

    On systems without user numbers every folder passes.

    Args:
        folder: An existing folder.

    Raises:
        OSError: The folder does not exist.
    """
    if not hasattr(os, "getuid"):
        return None
    folder = folder.resolve(strict=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        return f"{folder} belongs to another user (uid {found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} can be written by other users (mode {stat.S_IMODE(found.st_mode):04o}); chmod go-w {folder}"
    for parent in folder.parents:
        found = parent.stat()
        if found.st_uid not in (os.getuid(), _ROOT, _unmapped_user()):
            return f"{parent}, above {folder}, belongs to another user (uid {found.st_uid})"
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid != os.getgid()
        if (by_group or found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            mode = f"mode {stat.S_IMODE(found.st_mode):04o}"
            return f"{parent}, above {folder}, can be written by other users ({mode}); chmod go-w {parent}"
    return None


def _unmapped_user() -> int:
    """The number that stands for root and all other users of the host inside a container without their numbers."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return _ROOT
