"""Loading one environment, from Brax's registry or by import path."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import sys
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from rlstable.config import ConfigError, EnvConfig


def load_env(config: EnvConfig, extra_kwargs: Mapping[str, Any] | None = None) -> Any:
    """One environment with Brax's Env interface.

    Args:
        config: Which one, and its constructor's keyword arguments.
        extra_kwargs: Arguments that win over the configuration's, e.g. `eval.env_kwargs`.

    Raises:
        ConfigError: No such environment, class or module, or arguments that it does not take.
    """
    kwargs = dict(config.kwargs or {}) | dict(extra_kwargs or {})
    if config.backend is not None:
        kwargs.setdefault("backend", config.backend)
    factory = _brax_class(config.name) if config.source == "brax" else _imported_class(config.name)
    try:
        with warnings.catch_warnings():
            # Brax says at every construction that its own engines are not maintained.
            warnings.filterwarnings("ignore", message="Brax System", category=UserWarning)
            env = factory(**kwargs)
    except (TypeError, ValueError, KeyError, AssertionError, NotImplementedError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no arguments"
        raise ConfigError(
            f"env.kwargs: {config.name} cannot be built with {given}: {_first_line(error)}; "
            "see env.backend, env.kwargs and eval.env_kwargs"
        ) from error
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise ConfigError(f"env.name: {config.name} has no method {method}; it must have Brax's Env interface")
    return env


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _brax_class(name: str) -> Any:
    # Without warp-lang, mujoco.mjx prints what it could not import and works all the same.
    with contextlib.redirect_stdout(io.StringIO()):
        from brax import envs, fluid

    if isinstance(fluid.jp, types.ModuleType):
        # Brax 0.14's fluid model, which its swimmer needs, calls `clip` by a name that jax 0.10 no longer knows.
        clip = lambda x, a_min: jnp.clip(x, min=a_min)  # noqa: E731
        fluid.jp = types.SimpleNamespace(**{**vars(jnp), "clip": clip})
    known = envs._envs
    if name not in known:
        close = difflib.get_close_matches(name, list(known), n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(sorted(known))}"
        raise ConfigError(f"env.name: Brax has no environment {name!r}; {hint}")
    return known[name]


def _imported_class(path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        # A class beside the user's own script is found from the folder the command is typed in.
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"env.name: no module {error.name!r} for {path!r}; is it installed, or in this folder?"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"env.name: {module_name} cannot be imported: {type(error).__name__}: {_first_line(error)}"
        ) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if isinstance(getattr(module, name), type)]
        close = difflib.get_close_matches(attribute, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"env.name: module {module_name} has no {attribute!r}{hint}")
    return getattr(module, attribute)
