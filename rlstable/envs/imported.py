"""Importing an environment by its path `package.module:Class`, and what may be called there.

Only two kinds of object are called: a class with `reset` and `step`, as Brax's Env and Playground's MjxEnv have them,
and a Python function defined in the very module that is named. From rlstable, Brax and Playground it is only the
first: their functions save, load and unpickle files. Nothing of Python's standard library is imported or called.
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
    """The class or function that `env.name` names.

    The current folder is put first into `sys.path`, unless the package is one of rlstable, Brax and Playground.

    Raises:
        ConfigError: It is of the standard library, cannot be imported, or is not of a kind that may be called.
    """
    path = config.name
    module_name, _, attribute = path.partition(":")
    if config.package in sys.stdlib_module_names:
        raise ConfigError(
            f"env.name: {path} is in Python's standard library, of which nothing is called; "
            "name a class with Brax's Env interface, or a function of your own that makes one"
        )
    if config.is_foreign and str(Path.cwd()) not in sys.path:
        # A class beside the user's own script is found from the folder the command is typed in.
        sys.path.insert(0, str(Path.cwd()))
    sources.mark_process_modified()
    found = _attribute(_module(module_name, path), attribute)
    _require_callable(found, config)
    return found


def _module(name: str, path: str) -> types.ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.name: no module {error.name!r} for {path!r}; is it installed, or in this folder?"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"env.name: {name} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error


def _attribute(module: types.ModuleType, name: str) -> Any:
    if not hasattr(module, name):
        names = [known for known in vars(module) if isinstance(getattr(module, known), type)]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"env.name: module {module.__name__} has no {name!r}{hint}")
    return getattr(module, name)


def _require_callable(found: Any, config: EnvConfig) -> None:
    path, module_name = config.name, config.name.partition(":")[0]
    if isinstance(found, type):
        for method in _METHODS:
            if not callable(getattr(found, method, None)):
                raise ConfigError(f"env.name: {path} has no method {method}; it must have Brax's Env interface")
        return
    if not config.is_foreign:
        raise ConfigError(
            f"env.name: {path} is no class, and functions of {config.package} are not called; "
            "name a class with Brax's Env interface, or a function of your own that makes one"
        )
    function = inspect.unwrap(found) if callable(found) else found  # of functools.cache
    if not isinstance(function, types.FunctionType) or function.__module__ != module_name:
        raise ConfigError(
            f"env.name: {path} is not called: it is neither a class with Brax's Env interface nor a function that is "
            f"defined in {module_name}"
        )
