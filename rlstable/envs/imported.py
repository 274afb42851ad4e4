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

_METHODS = ("reset", "step")


def environment_factory(config: EnvConfig) -> Any:
    """The class or function named by `env.name`.

    Puts the current folder first into `sys.path`, unless the package is rlstable, Brax or Playground.

    Raises:
        ConfigError: The object is in the standard library, cannot be imported, or may not be called.
    """
    path = config.name
    module_name, _, attribute = path.partition(":")
    if config.package in sys.stdlib_module_names:
        raise ConfigError(
            f"env.name: {path} is in Python's standard library and is not called; "
            "name a class with Brax's Env interface, or a function in your own module that returns an environment"
        )
    if config.is_foreign and str(Path.cwd()) not in sys.path:
        # Python then finds a module in the folder in which the user types the command.
        sys.path.insert(0, str(Path.cwd()))
    sources.mark_process_modified()
    factory = _attribute(_module(module_name, path), attribute)
    _require_callable(factory, config)
    return factory


def randomization_fn(config: EnvConfig) -> Any:
    """The function named by `env.randomization_fn`.

    Raises:
        ConfigError: The function cannot be imported, or is no Python function of the named module.
    """
    path = config.randomization_fn or ""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    sources.mark_process_modified()
    try:
        function = _attribute(_module(module_name, path), attribute)
    except ConfigError as error:
        raise ConfigError(str(error).replace("env.name:", "env.randomization_fn:", 1)) from error
    if not isinstance(function, types.FunctionType) or function.__module__ != module_name:
        raise ConfigError(f"env.randomization_fn: {path} must be a function that is defined in {module_name}")
    return function


def _module(name: str, path: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.name: no module {error.name!r} for {path!r}; install it, or run the command in its folder"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"env.name: {name} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error


def _attribute(module: types.ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        classes = [other for other in vars(module) if isinstance(getattr(module, other), type)]
        close = difflib.get_close_matches(name, classes, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"env.name: module {module.__name__} has no {name!r}{hint}")
    return getattr(module, name)


def _require_callable(factory: Any, config: EnvConfig) -> None:
    path, module_name = config.name, config.name.partition(":")[0]
    if isinstance(factory, type):
        for method in _METHODS:
            if not callable(getattr(factory, method, None)):
                raise ConfigError(f"env.name: {path} has no method {method}; it must have Brax's Env interface")
        return
    if not config.is_foreign:
        raise ConfigError(
            f"env.name: {path} is not a class, and functions of {config.package} are not called; "
            "name a class with Brax's Env interface, or a function in your own module that returns an environment"
        )
    function = inspect.unwrap(factory) if callable(factory) else factory  # removes functools.cache
    if not isinstance(function, types.FunctionType) or function.__module__ != module_name:
        raise ConfigError(
            f"env.name: {path} is not called: it must be a class with Brax's Env interface, or a function that is "
            f"defined in {module_name}"
        )
