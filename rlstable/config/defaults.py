"""Default settings, read from `configs/`. No default is written anywhere else."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_HYDRA_KEYS = ("defaults", "hydra")  # keys of config.yaml that are not settings


def config_dir() -> Path:
    """The folder `configs`: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def defaults(section: str) -> dict[str, Any]:
    """The default settings of a section, e.g. `guards.storm`, with its subsections; empty for all of `config.yaml`.

    Settings without a default are absent.
    """
    keys = section.split(".") if section else []
    group = config_dir() / keys[0] / "default.yaml" if keys else None
    if group is not None and group.is_file():
        settings, keys = _read(group), keys[1:]
    else:
        settings = {**_read(config_dir() / "recipe_for" / "auto.yaml"), **_read(config_dir() / "config.yaml")}
    for key in keys:
        settings = settings[key]
    return {key: value for key, value in settings.items() if value != "???"}


@functools.cache
def _read(path: Path) -> dict[str, Any]:
    settings: Any = OmegaConf.to_container(OmegaConf.load(path))
    return {str(key): value for key, value in settings.items() if key not in _HYDRA_KEYS}
