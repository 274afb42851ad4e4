"""Code that a run folder names and the user has not typed: what of it may run without `trust=true`.

A folder from the internet belongs to the user who unpacks it, so its owner says nothing. Of the code that it names,
only a class with `reset` and `step` is called, or a function of the user's own modules: neither built in, nor of the
standard library, nor of an installed package, some of whose functions delete, unpickle or execute their arguments.
"""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError

# By import path the file that names it, and what the user writes to trust it.
_named: dict[str, tuple[Path, str]] = {}


def distrust(path: str, file: Path, how: str) -> None:
    """Remembers that a file of a run folder names an import path; `how` is what the user adds to trust it."""
    _named[path] = file, how


def trust(path: str) -> None:
    _named.pop(path, None)


def check_module(path: str, key: str) -> None:
    """Raises a `ConfigError` before a module below a run folder that names it, or of Python itself, is imported."""
    if path not in _named:
        return
    files = _files_of(path.partition(":")[0])
    folder = _run_folder(_named[path][0])
    if files is None:
        raise _refusal(path, key, "is a module of Python itself")
    if any(file.is_relative_to(folder) for file in files):
        raise _refusal(path, key, f"is a file of that folder, {files[0]}")


def check_object(path: str, key: str, found: object) -> None:
    """Raises a `ConfigError` if an imported object that a run folder names may not be called."""
    if path not in _named:
        return
    if isinstance(found, type):
        if not all(callable(getattr(found, method, None)) for method in ("reset", "step")):
            raise _refusal(path, key, "is a class without reset and step")
    elif not _is_own(getattr(found, "__module__", None)):
        raise _refusal(path, key, "is no function of a module of your own")


def _refusal(path: str, key: str, reason: str) -> ConfigError:
    file, how = _named[path]
    return ConfigError(f"{key}: {path}, which {file} names, {reason}; read that code, then add {how}")


def _run_folder(file: Path) -> Path:
    """The run folder above a configuration, which may be of a seed or of an incident."""
    folder = file.resolve().parent
    if folder.parent.name == "incidents":
        folder = folder.parents[1]
    return folder.parent if folder.name.startswith("seed-") else folder


def _is_own(module: Any) -> bool:
    if not isinstance(module, str) or (files := _files_of(module)) is None:
        return False
    installed = [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))]
    folders = [Path(folder).resolve() for folder in installed]
    return not any(file.is_relative_to(folder) for file in files for folder in folders)


def _files_of(module: str) -> list[Path] | None:
    """The files of a module, or the folders of a package without one, without an import; None if it is of Python."""
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None
    spec: ModuleSpec | None = None
    for part in module.split("."):
        try:  # a full name would need its parents to be imported
            spec = importlib.util.find_spec(part) if spec is None else PathFinder.find_spec(part, _folders(spec))
        except (ImportError, ValueError):  # `__main__` has no spec
            return []
        if spec is None:
            return []
    files = [spec.origin] if spec is not None and spec.origin else _folders(spec)
    return [Path(file).resolve() for file in files]


def _folders(spec: ModuleSpec | None) -> list[str]:
    return list((spec and spec.submodule_search_locations) or ())
