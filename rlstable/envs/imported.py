"""Imports an environment by its path `package.module:Class`.

Another user's run folder may name code of rlstable, Brax and Playground without trust. Of these packages only a class
with `reset` and `step` is called, because some of their functions save, load or unpickle files.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlstable.compilation import sources
from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line
from rlstable.device.trees import Env
from rlstable.envs.randomized import RandomizationFn


def environment_factory(config: EnvConfig) -> Callable[..., Env]:
    """The class or function named by `env.name`; a `ConfigError` if it cannot be imported, or may not be called."""
    path = config.name
    factory = _imported(path, "env.name", config.is_foreign)
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
    function = _imported(config.randomization_fn or "", "env.randomization_fn", own=True)
    if not callable(function):
        raise ConfigError(f"env.randomization_fn: {config.randomization_fn} is no function")
    return function


def _imported(path: str, key: str, own: bool) -> Any:
    """The object with this path; Python also searches the current folder if the module is the user's own."""
    name, _, attribute = path.partition(":")
    if own and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    sources.mark_process_modified()
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: no module {error.name!r} for {path!r}; install it, or run the command in its folder"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key}: {name} cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    if not hasattr(module, attribute):
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{key}: module {name} has no {attribute!r}{hint}")
    return getattr(module, attribute)
