"""Removes Brax's and Playground's training wrappers, whose work (vectorise, repeat, truncate, reset) rlstable does."""

from __future__ import annotations

import copy
from typing import Any

from rlstable.config import ConfigError

_MODULES = ("brax.envs.wrappers.training", "mujoco_playground._src.wrapper")
_REMOVED = ("VmapWrapper", "EpisodeWrapper", "AutoResetWrapper", "EvalWrapper", "BraxAutoResetWrapper")
_REFUSED = ("DomainRandomizationVmapWrapper", "BraxDomainRandomizationVmapWrapper")


def without_training_wrappers(env: Any) -> tuple[Any, tuple[str, ...]]:
    """The environment without its training wrappers, and their names with their settings, outermost first.

    Other wrappers stay, as copies if a training wrapper is inside. A wrapper that randomises is a `ConfigError`.
    """
    kind = type(env)
    if kind.__module__ in _MODULES and kind.__name__ in _REFUSED:
        raise ConfigError(
            f"env.name: {kind.__name__} randomises all environments together; pass the environment inside of it, and "
            "its function as env.randomization_fn or as randomization_fn of brax_ppo.train"
        )
    inner = vars(env).get("env") if hasattr(env, "__dict__") else None
    if not hasattr(inner, "step"):
        return env, ()
    bare, removed = without_training_wrappers(inner)
    if kind.__module__ in _MODULES and kind.__name__ in _REMOVED:
        numbers = {key: vars(env)[key] for key in ("episode_length", "action_repeat") if key in vars(env)}
        settings = ", ".join(f"{key}={value}" for key, value in numbers.items())
        return bare, (f"{kind.__name__}({settings})", *removed)
    if removed:
        env = copy.copy(env)
        env.env = bare
    return env, removed
