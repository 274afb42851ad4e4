"""Chooses the recipe for this machine. Imports no JAX, so that printing a configuration is quick."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlstable.config.defaults import config_dir

_CPU = "cpu"  # the recipe of every environment without a recipe <name>_cpu
_DEVICE_FILES = ("nvidia0", "kfd", "accel0", "vfio/0")  # NVIDIA, AMD, old and new TPU
_PLUGINS = "jax_plugins"


def recipe(name: str, recipe_for: str) -> str:
    """The recipe of an environment for a device: on a CPU `<name>_cpu` if it exists, else `cpu`; otherwise `name`.

    Args:
        name: The recipe for accelerators.
        recipe_for: `cpu`, `accelerator`, or `auto` for the present device.
    """
    if recipe_for == "accelerator" or (recipe_for == "auto" and has_accelerator()):
        return name
    own = f"{name}_{_CPU}"
    return own if (config_dir() / "ppo" / f"{own}.yaml").is_file() else _CPU


def notice(overrides: Sequence[str], recipe_for: str) -> str:
    """A line that names the recipe of a run and the reason.

    Args:
        overrides: Overrides on the command line.
        recipe_for: `auto`, `cpu` or `accelerator`.
    """
    typed = {key.lstrip("+~"): value for key, _, value in (override.partition("=") for override in overrides)}
    if "ppo" in typed:
        return f"recipe: {typed['ppo']}, as ppo={typed['ppo']} asks"
    env = typed.get("env") or default_environment()
    entry = entry_of(env)
    if entry is None:
        return f"recipe: the one that env={env} selects"
    name = published(entry)
    if name == entry:
        return f"recipe: {name}, the only one of env={env}"
    chosen, other = recipe(name, recipe_for), "cpu" if recipe(name, recipe_for) == name else "accelerator"
    why = f"recipe_for={recipe_for}"
    if recipe_for == "auto":
        why += ", and this machine has an accelerator" if chosen == name else ", and this machine has no accelerator"
    return f"recipe: {chosen} ({why}); recipe_for={other} selects ppo={recipe(name, other)}"


def default_environment() -> str:
    """The option of the group `env` that `config.yaml` selects."""
    config: Any = OmegaConf.load(config_dir() / "config.yaml")
    return next(str(entry["env"]) for entry in config.defaults if not isinstance(entry, str) and "env" in entry)


def entry_of(env: str) -> str | None:
    """The entry `override /ppo` of an environment's file, not resolved; None if there is no such file or entry."""
    file = config_dir() / "env" / f"{env}.yaml"
    match = re.search(r"override /ppo: *(\S+)", file.read_text()) if file.is_file() else None
    return match and match.group(1)


def published(entry: str) -> str:
    """The recipe for an accelerator in an entry `override /ppo`."""
    match = re.fullmatch(r"\$\{rlstable\.recipe:(\w+),.*", entry)
    return match.group(1) if match else entry


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
