"""Chooses the recipe for this machine. Imports no JAX, so that printing a configuration is quick."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_SUFFIX = "_cpu"
_DEVICE_FILES = ("nvidia0", "kfd", "accel0", "vfio/0")  # NVIDIA, AMD, old and new TPU
_PLUGINS = "jax_plugins"


def recipe(name: str, device: str, folder: Path) -> str:
    """The recipe of an environment for a device: `<name>_cpu` if it exists and the device is a CPU, else `name`.

    Args:
        name: The recipe for accelerators.
        device: `cpu`, `accelerator`, or `auto` for the present device.
        folder: The folder of the recipes.
    """
    on_cpu = device == "cpu" or (device == "auto" and not has_accelerator())
    return name + _SUFFIX if on_cpu and (folder / f"{name}{_SUFFIX}.yaml").is_file() else name


def notice(choices: Mapping[str, str], overrides: Sequence[str] = ()) -> str | None:
    """A line about the recipe if this machine's device selected it; None if the user did.

    Args:
        choices: The option of every configuration group, by group.
        overrides: As typed by the user.
    """
    name = choices["ppo"]
    asked_for = any(override.startswith("ppo=") for override in overrides)
    if asked_for or choices["recipe_for"] != "auto" or not name.endswith(_SUFFIX):
        return None
    other = name.removesuffix(_SUFFIX)
    return f"recipe: {name}, the recipe for a CPU (recipe_for=auto); ppo={other} is the recipe for an accelerator"


def has_accelerator() -> bool:
    """Whether JAX will probably find an accelerator, without importing JAX.

    Reads `JAX_PLATFORMS`; without it, looks for a device file and a JAX plug-in.
    """
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms:
        return platforms.split(",")[0] != "cpu"
    if not any(Path("/dev", name).exists() for name in _DEVICE_FILES):
        return False
    namespace = importlib.util.find_spec(_PLUGINS) is not None
    declared = importlib.metadata.entry_points(group=_PLUGINS)
    return namespace or bool(declared) or importlib.util.find_spec("libtpu") is not None
