"""Import of MJX without messages about warp-lang. The package `rlstable` imports this module first."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from typing import Any

_WARP = "mujoco.mjx.warp"  # the module that prints when it cannot import warp-lang, which is optional


class _WarpFinder:
    """Finds the module `mujoco.mjx.warp`, whose `print` then leaves out that warp-lang is not installed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        """The spec of `mujoco.mjx.warp`; None for every other module."""
        if name != _WARP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_quietly(module: Any) -> None:
                module.print = print_other_errors
                execute(module)

            spec.loader.exec_module = execute_quietly  # type: ignore[method-assign]
        return spec


def print_other_errors(*values: Any) -> None:
    """Prints values as `print` does, unless one of them is the error that the package `warp` is not installed."""
    if not any(isinstance(value, ModuleNotFoundError) and value.name == "warp" for value in values):
        print(*values)


def silence_missing_warp() -> None:
    """Lets MJX be imported without the lines `Failed to import warp` if warp-lang is missing; other errors stay."""
    if _WarpFinder not in sys.meta_path:
        sys.meta_path.insert(0, _WarpFinder)
