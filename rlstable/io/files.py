"""Opens every file of a run folder, which another user may have filled.

No link below the folder is followed, and only regular files up to a size are read, so that a command changes and shows
nothing outside the folder and does not hang. A new file has a random name until it is complete.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlstable.config import ConfigError

_MOST = 256 * 2**20  # bytes of a file that is read
_DEEPEST = 50  # levels of a YAML file
_MODE = 0o644  # whatever the umask: settings may name code (`private_folder.require_trust`)


def one_line(error: BaseException) -> str:
    """The type and the first 300 characters of an error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def below(folder: Path, name: str) -> Path:
    """The path of a file or folder below a run folder; a `ConfigError` if a part of the name is a symbolic link."""
    path = folder
    for part in PurePath(name).parts:
        path /= part
        if path.is_symlink():
            raise ConfigError(f"run: {path} is a symbolic link, which is not followed in a run folder; delete it")
    return path


def subfolder(folder: Path, name: str) -> Path:
    """Creates a folder below a run folder, if it is missing; raises like `below`, or `OSError`."""
    path = below(folder, name)
    path.mkdir(mode=0o755, parents=True, exist_ok=True)
    return path


def open_file(path: Path, flags: int) -> int:
    """Opens a regular file; an `OSError`, or a `ConfigError` if the path is a link or not a regular file."""
    below(path.parent, path.name)
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"run: {path} is not a regular file; delete it")
    return file


def read(path: Path) -> bytes:
    """The content of a file; errors as for `open_file`, or a file that is too large."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise ConfigError(f"run: {path} is larger than {_MOST // 2**20} MiB; it is not read")
    return content


def read_json(path: Path) -> Any:
    """The content of a JSON file; errors as for `read`, or a `ValueError` if the file is damaged."""
    return parse_json(read(path))


def parse_json(text: bytes | str) -> Any:
    """Parses JSON; damaged and too deeply nested text is a `ValueError`."""
    try:
        return json.loads(text)
    except (RecursionError, MemoryError) as error:
        raise ValueError(one_line(error)) from error


def read_yaml(path: Path) -> Any:
    """The content of a YAML file; errors as for `read`, or a `ConfigError` if the file is damaged.

    Aliases, which could grow without bound, and deep nesting are damage.
    """
    text = read(path)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > _DEEPEST:
                raise ValueError(f"it has a YAML alias, or is nested deeper than {_DEEPEST} levels")
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text.decode())))
    except Exception as error:  # several YAML libraries raise different errors
        raise ConfigError(f"run: {path} cannot be read: {str(error).splitlines()[0]}") from error


# Texts of pages, of the versions in machine.json and in a policy's metadata, of results, and of play.py.
_OWN = (b"<title>rlstable: ", b'"rlstable": "', b'"stop_reason": "', b'"""Runs an exported policy of a robot')
_OF_EVENTS = b'"kind": "'


def require_replaceable(folder: Path, names: Iterable[str], key: str) -> None:
    """Raises a `ConfigError` that names the key if a folder holds a file of these names, and none of them is ours."""
    found = (path for path in (folder / name for name in names) if os.path.lexists(path))
    held = [path for path in found if not path.is_dir() or any(path.iterdir())]  # a failed start leaves empty folders
    if held and not any(_is_own(path) for path in held):
        raise ConfigError(f"{key}: {held[0]} would be replaced, and rlstable did not write it; choose another folder")


def _is_own(path: Path) -> bool:
    try:
        content = read(path)
    except (OSError, ConfigError):
        return False
    return any(mark in content for mark in _OWN) or (path.suffix == ".jsonl" and _OF_EVENTS in content)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file completely or not at all. A link under its name is replaced."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        with os.fdopen(file, "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
