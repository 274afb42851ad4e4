"""Versions of rlstable, Python and the packages that can change a run's numbers."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata

from rlstable import __version__

PACKAGES = ("jax", "jaxlib", "brax", "mujoco", "mujoco-mjx", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Versions by name, without importing any of the packages; what is not installed is `none`."""
    return {"rlstable": __version__, "python": platform.python_version(), **{name: _of(name) for name in PACKAGES}}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Differences as `old -> new` by name; names that only one side knows are no change."""
    return {name: f"{old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]}


@functools.cache  # packages installed while a process runs are not the ones it runs with, and a look takes milliseconds
def _of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
