"""Environment objects that the user passes from Python, in the place of a name in the configuration."""

from __future__ import annotations

from typing import Any, NamedTuple


class Environments(NamedTuple):
    """Environment objects of a run, with Brax's Env interface; may be the same object."""

    train: Any
    evaluate: Any


def name_of(env: Any) -> str:
    """The import path of an environment object's class, `package.module:Class`, for the configuration and the pages."""
    kind = type(getattr(env, "unwrapped", env))
    return f"{kind.__module__}:{kind.__name__}"
