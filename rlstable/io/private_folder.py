"""Folders whose files are executed: checks that no other user can write or replace them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.io import named_code

_ROOT = 0


def user_cache() -> Path:
    """The user's cache, `$XDG_CACHE_HOME/rlstable` or `~/.cache/rlstable`; a `RuntimeError` without a home folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlstable"


def make_private(folder: Path) -> None:
    """Creates a folder and its missing parents with mode 0700; an `OSError` if a file has its name."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)  # another process may create the same folder


def code_named(env: EnvConfig) -> dict[str, str]:
    """Import paths that name code outside rlstable, Brax and Playground, each with its key."""
    named = {env.name: "env.name"} if env.is_foreign else {}
    named |= dict.fromkeys(env.own_terms, "env.task")
    return named if env.randomization_fn is None else {**named, env.randomization_fn: "env.randomization_fn"}


def require_trust(file: Path, env: EnvConfig, trust: bool, how: str = "trust=true", typed: Iterable[str] = ()) -> None:
    """Raises a `ConfigError` if another user owns or may write settings that name code, unless `trust` is True.

    Without trust, `named_code` checks the code itself before it is imported, and before it is called. Names in `typed`,
    the values of the command line, are the user's own.
    """
    words = list(typed)
    named = {code: key for code, key in code_named(env).items() if not any(code in word for word in words)}
    for code in named:
        named_code.trust(code) if trust else named_code.distrust(code, file, how)
    if not named or trust:
        return
    (code, key), *_ = named.items()
    for path in (file.parent, file):
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"run: {file} names code outside rlstable, Brax and Playground, {key}={code}, and another user owns "
                f"{path} or may write it; read that code, then add {how}, or chmod go-w your own folder"
            )


def writable_by_others(folder: Path) -> str | None:
    """Why another user could write the files of a folder, as one line; None if only this user and root can.

    Symbolic links are resolved first. The folder must belong to this user, without write permission for group or
    others. Each parent must belong to this user or to root. A parent that its group or others may write to must have
    the sticky bit, like `/tmp`; otherwise another user could replace the folder. The user's group may write to a
    parent, because some systems create all folders of a home with umask 002. Raises `OSError` without the folder.
    """
    folder = folder.resolve(strict=True)
    for path in (folder, *folder.parents):
        status, above = path.stat(), path != folder
        if status.st_uid != os.getuid() and not (above and status.st_uid in (_ROOT, _unmapped_user())):
            return f"{path} belongs to another user (uid {status.st_uid})"
        own_group = above and status.st_gid == os.getgid()
        writable = status.st_mode & (stat.S_IWOTH if own_group else stat.S_IWGRP | stat.S_IWOTH)
        if writable and not (above and status.st_mode & stat.S_ISVTX):
            return f"{path} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w {path}"
    return None


def _unmapped_user() -> int:
    """The id that a container shows for root and other users of the host."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return _ROOT
