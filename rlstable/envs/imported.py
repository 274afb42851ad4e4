"""Imports an environment by its path `package.module:Class`, and restricts the objects that may be called.

- Allowed: a class with `reset` and `step`, like Brax's Env and Playground's MjxEnv.
- Allowed outside rlstable, Brax and Playground: a Python function that is defined in the named module. Functions of
  these three packages are not called, because some save, load or unpickle files.
- Python's standard library is neither imported nor called.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import types
from pathlib import Path
from typing import Any

from rlstable.compilation import sources
from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line


def environment_factory(config: EnvConfig) -> Any:
    """The class or function named by `env.name`; a `ConfigError` if it cannot be imported, or may not be called."""
    path = config.name
    if config.package in sys.stdlib_module_names:
        raise ConfigError(
            f"env.name: {path} is in Python's standard library and is not called; "
            "name a class with Brax's Env interface, or a function in your own module that returns an environment"
        )
    factory = _imported(path, "env.name", config.is_foreign)
    if isinstance(factory, type):
        for method in ("reset", "step"):
            if not callable(getattr(factory, method, None)):
                raise ConfigError(f"env.name: {path} has no method {method}; it must have Brax's Env interface")
        return factory
    function = inspect.unwrap(factory) if callable(factory) else factory  # removes functools.cache
    if not config.is_foreign or not _is_function_of(path, function):
        raise ConfigError(
            f"env.name: {path} is not called: it must be a class with Brax's Env interface, or a function that is "
            "defined in a module of your own and returns an environment"
        )
    return factory


def randomization_fn(config: EnvConfig) -> Any:
    """The function named by `env.randomization_fn`; a `ConfigError` unless the named module defines it."""
    path = config.randomization_fn or ""
    function = _imported(path, "env.randomization_fn", own=True)
    if not _is_function_of(path, function):
        raise ConfigError(f"env.randomization_fn: {path} must be a function that is defined in this module")
    return function


def _is_function_of(path: str, function: Any) -> bool:
    """Whether an object is a Python function that the module of the path defines, and does not import."""
    return isinstance(function, types.FunctionType) and function.__module__ == path.partition(":")[0]


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
