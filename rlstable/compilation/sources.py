"""The files that programs are traced from: what they say, and whether this process is sure to compute that."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

import psutil

# Packages whose files have a part in what is traced; of all that is installed it is at least the version.
_PACKAGES = ("rlstable", "brax", "mujoco.mjx", "flax", "optax")
_SUFFIXES = (".py", ".xml")
_ENVIRONMENT = ("BRAX_", "FLAX_", "MJX_", "MUJOCO_")

_trusted: list[bool] = []


def trust() -> None:
    """Says that what this process traces is what its files and its configuration say.

    So it is in the commands that train and examine. Before `rlstable.fit` anybody may have replaced a function in
    memory, `rlstable.evaluate` has networks as they were saved, and `rlstable.replay` records more than is configured.
    """
    _trusted.append(True)


def distrust() -> None:
    """Says that others have run code of their own in this process."""
    _trusted.clear()


def fingerprint() -> str | None:
    """A hash of the files, of what is installed and what is set for it; None where something else may be traced."""
    if not _trusted:
        return None
    try:
        known = hashlib.blake2s()
        began = psutil.Process().create_time()
        for package in _PACKAGES:
            spec = importlib.util.find_spec(package)
            for folder in (spec and spec.submodule_search_locations) or ():
                for path in sorted(path for path in Path(folder).rglob("*") if path.suffix in _SUFFIXES):
                    about = path.stat()
                    # What was imported may have been another; a copy may keep the time of what it is copied from.
                    if max(about.st_mtime, about.st_ctime) > began:
                        return None
                    known.update(f"{package}/{path.relative_to(folder)}\n".encode())
                    known.update(hashlib.blake2s(path.read_bytes()).digest())
        settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_ENVIRONMENT))
        known.update("\n".join([*_installed(), *settings]).encode())
    except (OSError, psutil.Error):
        return None  # files come and go: an editor at work, an update
    return known.hexdigest()


def _installed() -> list[str]:
    """Names of all that is installed, which have versions in them."""
    places = [Path(place) for place in sys.path if place and Path(place).is_dir()]
    return sorted({path.name for place in places for path in place.glob("*.dist-info")})
