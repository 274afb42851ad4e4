"""Run folders whose code this user has agreed to run, remembered by path and content as `direnv allow` does it.

The settings of a run folder may name Python code to import, or a folder of compiled programs to execute. If another
user made the folder, this user has to agree once. Folders that are made here are remembered when they are made.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from rlstable.config import Config, ConfigError
from rlstable.io.private_folder import exposed_to_others, make_private
from rlstable.io.user_cache import user_cache

_FILE = "trusted_folders"


def code_named(config: Config) -> str | None:
    """The code outside rlstable, Brax and Playground that settings name, as `key=value`; None for none."""
    if config.env.is_foreign:
        return f"env.name={config.env.name}"
    # Compiled programs are machine code.
    return None if config.compile_cache in (None, "auto") else f"compile_cache={config.compile_cache}"


def remember(file: Path, config: Config) -> str | None:
    """Remembers settings that this user has made or agreed to, if they name code.

    Args:
        file: The settings, `config.yaml` of a run or `incident.json`.
        config: The same settings, read.

    Returns:
        Why they cannot be remembered; None if they are, or need not be.
    """
    if code_named(config) is None:
        return None
    try:
        entry = _entry(file)
        if entry in _entries():
            return None
        place = user_cache() / _FILE
        make_private(place.parent)
        handle = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "ab", buffering=0) as opened:
            # One write, so that lines of other processes stay whole. The empty line ends one that a full disk has cut.
            opened.write(f"\n{entry}\n".encode())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def require_trust(file: Path, config: Config, trust: bool, how: str = "trust=true") -> None:
    """Checks that this user has made settings that name code, or has agreed to them, and remembers that.

    Args:
        file: The settings, `config.yaml` of a run or `incident.json`.
        config: The same settings, read.
        trust: Whether the user agrees now.
        how: What the user types to agree.

    Raises:
        ConfigError: The settings name code, and this user has not agreed to run it.
    """
    named = code_named(config)
    if named is None:
        return
    if trust:
        remember(file, config)
        return
    try:
        known, why = _entry(file) in _entries(), ""
    except (OSError, RuntimeError) as error:
        known, why = False, f" ({error})"
    if not known:
        raise ConfigError(
            f"run: {file} names code outside rlstable, Brax and Playground, {named}, and is not known to be made by "
            f"this user{why}; look at that code, then add {how} once"
        )


def _entry(file: Path) -> str:
    """The line of a settings file: a hash of its path and content, and the path for people."""
    path = file.resolve()
    content = hashlib.blake2s(path.read_bytes()).digest()
    known = hashlib.blake2s(content + os.fsencode(path)).hexdigest()
    return f"{known} {json.dumps(str(path))}"  # JSON, since a path may contain a line break


def _entries() -> set[str]:
    """The lines that are remembered.

    Raises:
        PermissionError: Another user could have written them.
    """
    try:
        handle = os.open(user_cache() / _FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return set()
    with os.fdopen(handle, "rb") as opened:
        if exposed_to_others(os.fstat(handle)):
            raise PermissionError(f"{user_cache() / _FILE}: another user owns it or may write it")
        return set(opened.read().decode(errors="replace").splitlines())
