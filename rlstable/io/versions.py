"""Versions of rlstable, Python and the packages that can change a run's results."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib import metadata

from rlstable import __version__

PACKAGES = ("jax", "jaxlib", "brax", "mujoco", "mujoco-mjx", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Versions by name, without importing the packages; `none` for a package that is not installed."""
    return {"rlstable": __version__, "python": platform.python_version(), **{name: _of(name) for name in PACKAGES}}


def differences(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    """Differences as `old -> new`, by name; names in only one of the two are ignored."""
    return {name: f"{old[name]} -> {new[name]}" for name in new if name in old and old[name] != new[name]}


@functools.cache  # a lookup takes milliseconds, and a running process keeps its imported versions
def _of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
