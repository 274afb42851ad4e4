"""Environment objects that the user passes from Python, in the place of a name in the configuration."""

from __future__ import annotations

from typing import NamedTuple

from rlstable.device.trees import Env


class Environments(NamedTuple):
    """Environment objects of a run; may be the same object."""

    train: Env
    evaluate: Env


def name_of(env: object) -> str:
    """The import path of an environment object's class, `package.module:Class`, for the configuration and the pages."""
    kind = type(getattr(env, "unwrapped", env))
    return f"{kind.__module__}:{kind.__name__}"
