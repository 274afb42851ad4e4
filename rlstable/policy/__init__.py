"""A trained policy: loading, evaluating and playing it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["Policy", "load_policy"]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use: the commands' `--help` must not wait for JAX."""
    if name in __all__:
        return getattr(importlib.import_module("rlstable.policy.policy"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
