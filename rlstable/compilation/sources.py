"""Hashes the files that programs are traced from, and knows whether this process runs them unmodified."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

import psutil

# Packages whose files are traced; of all other installed packages the version counts.
_PACKAGES = ("rlstable", "brax", "mujoco.mjx", "flax", "optax")
_SUFFIXES = (".py", ".xml")
_ENVIRONMENT = ("BRAX_", "FLAX_", "MJX_", "MUJOCO_")

_trusted: list[bool] = []


def trust() -> None:
    """Says that what this process traces is what its files and its configuration say.

    True for the commands that train and examine. Before `rlstable.fit` the user's code may have replaced a function in
    memory, `rlstable.evaluate` has networks as they were saved, and `rlstable.replay` records more than is configured.
    """
    _trusted.append(True)


def distrust() -> None:
    """Marks that code of the user has run in this process."""
    _trusted.clear()


def fingerprint() -> str | None:
    """A hash of files, installed packages and JAX settings; None if something else may be traced."""
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
                    # The imported file may differ from the file on disk; a copied file may keep its old time.
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
