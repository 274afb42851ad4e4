"""Hashes the files that programs are traced from, knows whether this process runs them unmodified, imports more."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from rlstable.config import ConfigError
from rlstable.config.schema import first_line
from rlstable.io import named_code

# Packages whose files are hashed; all other installed packages are identified by their version.
_PACKAGES = ("rlstable", "brax", "mujoco.mjx", "flax", "optax")
_SUFFIXES = (".py", ".xml")
_ENVIRONMENT = ("BRAX_", "FLAX_", "MJX_", "MUJOCO_")

_unmodified = False


def mark_process_unmodified(unmodified: bool = True) -> None:
    """Declares that files and configuration determine everything that this process traces.

    Only the commands `train` and `doctor` call it: before `rlstable.fit`, the user's code may have replaced a function.
    """
    global _unmodified
    _unmodified = unmodified


def fingerprint(*more: str) -> str | None:
    """A hash of source files, installed packages and settings; None if something else may be traced."""
    if not _unmodified:
        return None
    try:
        digest = hashlib.blake2s()
        started = psutil.Process().create_time()
        for package in (*_PACKAGES, *more):
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in _SUFFIXES):
                    status = path.stat()
                    # The imported file may differ from the file on disk. A copied file may keep its old mtime.
                    if max(status.st_mtime, status.st_ctime) > started:
                        return None
                    digest.update(f"{package}/{path.relative_to(folder)}\n".encode())
                    digest.update(hashlib.blake2s(path.read_bytes()).digest())
        settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
        digest.update("\n".join([*_installed(), *settings]).encode())
    except (OSError, psutil.Error):
        return None  # files changed meanwhile, for example by an editor or an update
    return digest.hexdigest()


def digest_of_modules(*names: str) -> str:
    """A hash of the files of rlstable and of some modules, to compare the code of several processes."""
    digest = hashlib.blake2s()
    package = Path(__file__).parents[1]
    files = [(str(path.relative_to(package)), path) for path in sorted(package.rglob("*.py"))]
    files += [(name, Path(file)) for name in names if (file := getattr(sys.modules.get(name), "__file__", None))]
    for name, path in files:
        digest.update(f"{name}\n".encode() + hashlib.blake2s(path.read_bytes()).digest())
    return digest.hexdigest()


def imported(path: str, key: str, own: bool = True) -> Any:
    """The object at `package.module:attribute`; a ConfigError that names `key` if there is none, or without trust.

    Python also searches the current folder if the module is the user's own.
    """
    name, _, attribute = path.partition(":")
    if own and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    mark_process_unmodified(False)
    named_code.check_module(path, key)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: no module {error.name!r} for {path!r}; install it, or run the command in its folder"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}: {name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}: module {name} has no {attribute!r}{hint}")
    found = getattr(module, attribute)
    named_code.check_object(path, key, found)
    return found


def _installed() -> list[str]:
    """Names of the `dist-info` folders of all installed packages, which contain the versions."""
    folders = [Path(folder) for folder in sys.path if folder and Path(folder).is_dir()]
    return sorted({path.name for folder in folders for path in folder.glob("*.dist-info")})
