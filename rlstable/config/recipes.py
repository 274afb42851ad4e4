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
    """The recipe for a device in place of `name`, that for accelerators: on a CPU `<name>_cpu` or else `cpu`."""
    if recipe_for == "accelerator" or (recipe_for == "auto" and has_accelerator()):
        return name
    own = f"{name}_{_CPU}"
    return own if (config_dir() / "ppo" / f"{own}.yaml").is_file() else _CPU


def notice(overrides: Sequence[str], recipe_for: str) -> str:
    """A line that names the recipe of a run and the reason, from the overrides on the command line."""
    typed = {key.lstrip("+~"): value for key, _, value in (override.partition("=") for override in overrides)}
    if "ppo" in typed:
        return f"recipe: {typed['ppo']}, as ppo={typed['ppo']} asks"
    config: Any = OmegaConf.load(config_dir() / "config.yaml")
    env = typed.get("env") or next(entry["env"] for entry in config.defaults if "env" in entry)
    match = _selected(env)
    if match is None:
        return f"recipe: the one that env={env} selects"
    name = match.group(2)
    if not match.group(1):
        return f"recipe: {name}, the only one of env={env}"
    chosen = recipe(name, recipe_for)
    other = "cpu" if chosen == name else "accelerator"
    why = f"recipe_for={recipe_for}"
    if recipe_for == "auto":
        why += f", and this machine has {'an' if chosen == name else 'no'} accelerator"
    return f"recipe: {chosen} ({why}); recipe_for={other} selects ppo={recipe(name, other)}"


def _selected(env: str) -> re.Match[str] | None:
    """The recipe that an option of the group `env`, or the option that it extends, selects."""
    file = config_dir() / "env" / f"{env}.yaml"
    text = file.read_text() if file.is_file() else ""
    match = re.search(r"override /ppo: *(\$\{rlstable\.recipe:)?(\w+)", text)
    extended = re.search(r"^  - (\w+)$", text, re.MULTILINE)
    return match or (_selected(extended.group(1)) if extended else None)


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
