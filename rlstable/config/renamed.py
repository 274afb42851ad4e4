"""Keys of the previous version: renamed keys keep working, removed keys are dropped from saved settings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlstable.config.schema import ConfigError

# Guards that were named like their site: old name to new name.
GUARDS = {"transition": "finite_samples", "update": "finite_update", "state": "finite_state"}
# Sections and groups: old key to new key.
RENAMED = {
    "sinks": "logging",
    "device": "recipe_for",
    **{f"guards.{old}": f"guards.{new}" for old, new in GUARDS.items()},
}
# Values of `recipe_for`, the former `device`.
_RECIPES_FOR = ("auto", "cpu", "accelerator")
_OVERRIDE = re.compile(r"(?P<prefix>[+~]*)(?P<key>[^=@]+)(?P<rest>.*)", re.DOTALL)


def with_new_names(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Overrides as typed, with renamed keys under their new names.

    Returns:
        The overrides, and one line of warning for each renamed key.

    Raises:
        ConfigError: A key is set under both names, or `device` names a device instead of a recipe.
    """
    renamed, warnings = list(overrides), {}
    keys = {match["key"] for override in renamed if (match := _OVERRIDE.fullmatch(override))}
    for index, override in enumerate(renamed):
        match = _OVERRIDE.fullmatch(override)
        old = _renamed_part(match["key"]) if match else None
        if not match or old is None:
            continue
        new = RENAMED[old]
        if old == "device" and match["rest"].removeprefix("=") not in _RECIPES_FOR:
            raise ConfigError(
                "device: there is no such key; JAX trains on a GPU if it finds one, and the environment variable "
                "JAX_PLATFORMS=cuda or cpu demands one kind; recipe_for=accelerator or cpu selects the recipe"
            )
        if any(_within(key, new) for key in keys):
            raise ConfigError(f"{old}: was renamed to {new}, and both are set; keep {new}")
        renamed[index] = f"{match['prefix']}{new}{match['key'][len(old) :]}{match['rest']}"
        warnings[old] = f"{old} was renamed to {new}; write {renamed[index]}; only this version accepts the old key"
    return renamed, list(warnings.values())


def updated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings saved by a run of the previous version, with the keys of this version.

    Raises:
        ConfigError: The run used an option that this version no longer has.
    """
    new = {RENAMED.get(key, key): value for key, value in settings.items()}
    if isinstance(new.get("guards"), Mapping):
        new["guards"] = {GUARDS.get(key, key): value for key, value in new["guards"].items()}
    supervise = new.get("supervise")
    if isinstance(supervise, Mapping) and "warm_start" in supervise:
        if supervise["warm_start"].get("enabled"):
            raise ConfigError(
                "supervise.warm_start: this version has no warm start; resume the run with the version that started it"
            )
        new["supervise"] = {key: value for key, value in supervise.items() if key != "warm_start"}
    return new


def _renamed_part(key: str) -> str | None:
    return next((old for old in RENAMED if _within(key, old)), None)


def _within(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")
