"""Selects an environment from Python: a name, a mapping or an object as overrides of the command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlstable.config.overrides import is_mapping
from rlstable.config.overrides import overrides as overrides_of
from rlstable.envs.objects import name_of

# Prefixes of names, with the option of the group `env` that each selects.
_SOURCES = {"playground:": "playground", "gymnasium:": "gymnasium"}


def overrides_for(env: Any, keys: Mapping[str, Any]) -> tuple[list[str], Any]:
    """The overrides for an environment and other keys, and the environment if it is an object, else None.

    `env` is a name under `configs/env`, `playground:<task>`, `gymnasium:<task>`, `package.module:Class`, an environment
    object, or a mapping with keys of the group `env`; None selects nothing.
    """
    if is_mapping(env):
        settings = dict(env.items())
        env, keys = settings.pop("name", None), {**keys, "env": settings}
    words = [*_env_words(env), *(item for key, value in keys.items() for item in overrides_of(key, value))]
    return words, None if env is None or isinstance(env, str) else env


def _env_words(env: Any) -> list[str]:
    """The overrides that select an environment."""
    if env is None:
        return []
    if not isinstance(env, str):
        return ["env=import", "env.source=object", f"env.name={name_of(env)}", "env.backend=null"]
    for prefix, source in _SOURCES.items():
        if env.startswith(prefix):
            return [f"env={source}", f"env.name={env.removeprefix(prefix)}"]
    return ["env=import", f"env.name={env}"] if ":" in env else [f"env={env}"]
