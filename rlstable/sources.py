"""The source files that programs are traced from."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

import psutil

# Packages whose source files have a part in what is traced; of others it is their version.
_PACKAGES = ("rlstable", "brax", "mujoco.mjx", "flax", "optax")
_SUFFIXES = (".py", ".xml")

_trusted: list[bool] = []


def trust() -> None:
    """Says that what this process traces is what its source files and its configuration say.

    So it is in the commands that train, judge and examine. Before `rlstable.fit` anybody may have replaced a function
    in memory, and `rlstable.replay` has programs that record more than the configuration says.
    """
    _trusted.append(True)


def fingerprint() -> str | None:
    """A hash of all of them; None where this process may compute something else."""
    return _hashed() if _trusted else None


@functools.cache
def _hashed() -> str | None:
    began = psutil.Process().create_time()
    known = hashlib.blake2s()
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in _SUFFIXES):
                if path.stat().st_mtime > began:
                    return None  # changed since: what was imported may have been another
                known.update(f"{package}/{path.relative_to(folder)}\n".encode())
                known.update(hashlib.blake2s(path.read_bytes()).digest())
    return known.hexdigest()
