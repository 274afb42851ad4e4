"""Base class of environments around another environment."""

from __future__ import annotations

from typing import Any

from rlstable.device.trees import Env


class EnvWrapper:
    """An environment with the attributes of the environment inside, `env`, unless a subclass has its own."""

    def __init__(self, env: Env):
        self.env = env

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look names up before `env` exists.
        if name.startswith("__") or name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        """The innermost environment."""
        return getattr(self.env, "unwrapped", self.env)
