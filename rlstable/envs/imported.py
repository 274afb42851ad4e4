"""Imports an environment by its path `package.module:Class`.

Another user's run folder may name code of rlstable, Brax and Playground without trust. Of these packages only a class
with `reset` and `step` is called, because some of their functions save, load or unpickle files.
"""

from __future__ import annotations

from collections.abc import Callable

from rlstable.compilation import sources
from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.device.trees import Env
from rlstable.envs.randomized import RandomizationFn


def environment_factory(config: EnvConfig) -> Callable[..., Env]:
    """The class or function named by `env.name`; a `ConfigError` if it cannot be imported, or may not be called."""
    path = config.name
    factory = sources.imported(path, "env.name", config.is_foreign)
    if isinstance(factory, type):
        for method in ("reset", "step"):
            if not callable(getattr(factory, method, None)):
                raise ConfigError(f"env.name: {path} has no method {method}; it must have Brax's Env interface")
    elif not config.is_foreign or not callable(factory):
        raise ConfigError(
            f"env.name: {path} is not called: it must be a class with Brax's Env interface, or a function in a module "
            "of your own that returns an environment"
        )
    return factory


def randomization_fn(config: EnvConfig) -> RandomizationFn:
    """The function named by `env.randomization_fn`; a `ConfigError` if it cannot be imported."""
    function = sources.imported(config.randomization_fn or "", "env.randomization_fn")
    if not callable(function):
        raise ConfigError(f"env.randomization_fn: {config.randomization_fn} is no function")
    return function
