"""Settings of a resumed run that differ from the settings of its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstable.config import Config, ConfigError
from rlstable.config.schema import Section
from rlstable.io.run_folder import read_settings, seed_folders

# Settings that do not change training: where the run starts, logs and caches. A resume checks `devices` itself.
_NO_TRAINING = frozenset({"resume", "seeds", "devices", "logging", "render", "compile_cache"})


class SettingChange(NamedTuple):
    """A changed setting: the fields of the event `configuration_changed`.

    Attributes:
        key: Dotted key of the setting.
        old: The value that trained the checkpoint.
        new: The value from now on.
        how: `edited` if the user changed `config.yaml` in the run folder, `typed` if the command changed the setting.
    """

    key: str
    old: Any
    new: Any
    how: str


def changes(saved: Mapping[str, Any], config: Config, run_dir: Path) -> list[SettingChange]:
    """Compares the configuration of a checkpoint with the present one.

    Must run before `config.yaml` is written again.

    Args:
        saved: The configuration in the checkpoint's host data.
        config: The present configuration.
        run_dir: The run folder, whose `config.yaml` distinguishes edited values from typed ones.
    """
    # Seeds that train together take their settings from the parent folder.
    parent = [run_dir.parent] if run_dir in seed_folders(run_dir.parent) else []
    on_disk = [settings for folder in (run_dir, *parent) if (settings := _settings(folder)) is not None]
    result = []
    for key, old, new in _differences(saved, config, config.model_dump(mode="json"), ""):
        if key.partition(".")[0] not in _NO_TRAINING:
            edited = any(value_at(settings, key) == new for settings in on_disk)
            result.append(SettingChange(key, old, new, "edited" if edited else "typed"))
    return result


def value_at(settings: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key of nested settings; None if it does not exist."""
    value: Any = settings
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _differences(
    saved: Mapping[str, Any], section: Section, present: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    """Key, old and new value of every setting that differs; a mapping that is no section is one value."""
    for name in (name for name in present if name in saved):
        value, old, new = getattr(section, name), saved[name], present[name]
        if isinstance(value, Section) and isinstance(old, Mapping):
            yield from _differences(old, value, new, f"{prefix}{name}.")
        elif old != new and json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True):  # NaN equals NaN
            yield f"{prefix}{name}", old, new


def _settings(folder: Path) -> dict[str, Any] | None:
    try:
        return read_settings(folder)
    except ConfigError:
        return None  # `config.yaml` is missing or damaged; the checkpoint has the settings too
