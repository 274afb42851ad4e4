"""Remembers the run folders whose code this user trusts, by path and content, like `direnv allow`.

The settings of a run folder may name Python code to import, or a folder of compiled programs to execute. If another
user created the folder, this user must agree once (`trust=true`). Folders of this user's own runs are remembered when
they are created.
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
    """The key that names code outside rlstable, Brax and Playground, as `key=value`; None without one."""
    if config.env.is_foreign:
        return f"env.name={config.env.name}"
    if config.env.randomization_fn is not None:
        return f"env.randomization_fn={config.env.randomization_fn}"
    # Compiled programs are machine code.
    return None if config.compile_cache in (None, "auto") else f"compile_cache={config.compile_cache}"


def remember(file: Path, config: Config) -> str | None:
    """Remembers trusted settings, if they name code.

    Args:
        file: The settings file, `config.yaml` of a run or `incident.json`.
        config: The settings in the file.

    Returns:
        Why the settings cannot be remembered; None on success, or if they name no code.
    """
    if code_named(config) is None:
        return None
    try:
        entry = _entry(file)
        if entry in _entries():
            return None
        path = user_cache() / _FILE
        make_private(path.parent)
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "ab", buffering=0) as opened:
            # One write keeps lines of other processes intact. The first newline ends a line that a full disk cut.
            opened.write(f"\n{entry}\n".encode())
    except (OSError, RuntimeError) as error:
        return str(error)
    return None


def require_trust(file: Path, config: Config, trust: bool, how: str = "trust=true") -> None:
    """Checks that this user trusts settings that name code. If `trust` is true, remembers them.

    Args:
        file: The settings file, `config.yaml` of a run or `incident.json`.
        config: The settings in the file.
        trust: Whether the user agrees now.
        how: Option that the user types to agree.

    Raises:
        ConfigError: The settings name code that this user has not agreed to run.
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
            f"run: {file} names code outside rlstable, Brax and Playground, {named}, and is not in "
            f"this user's list of trusted run folders{why}; read that code, then add {how} once"
        )


def _entry(file: Path) -> str:
    """The line of a settings file: a hash of path and content, and the path as readable text."""
    path = file.resolve()
    content = hashlib.blake2s(path.read_bytes()).digest()
    digest = hashlib.blake2s(content + os.fsencode(path)).hexdigest()
    return f"{digest} {json.dumps(str(path))}"  # JSON, because a path may contain a line break


def _entries() -> set[str]:
    """The remembered lines.

    Raises:
        PermissionError: Another user could have written the file.
    """
    try:
        handle = os.open(user_cache() / _FILE, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return set()
    with os.fdopen(handle, "rb") as opened:
        if exposed_to_others(os.fstat(handle)):
            raise PermissionError(f"{user_cache() / _FILE}: another user owns it or may write it")
        return set(opened.read().decode(errors="replace").splitlines())
