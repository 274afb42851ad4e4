"""Loading one environment, from Brax's registry or by import path."""

from __future__ import annotations

import contextlib
import difflib
import io
import types
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line
from rlstable.envs.imported import environment_factory
from rlstable.envs.interface import location, user_code_error
from rlstable.envs.mujoco_batch import Unsupported


class Loaded(NamedTuple):
    """An environment, and what became of its choice of physics.

    Attributes:
        env: It has Brax's Env interface.
        backend: What computes its physics, as `env.backend` names it; None where the environment has no choice.
        fallback_reason: Why `env.backend=auto` came to that; None where there was a better reason than a lack.
    """

    env: Any
    backend: str | None
    fallback_reason: str | None = None


def load_env(config: EnvConfig, extra_kwargs: Mapping[str, Any] | None = None, devices: int = 1) -> Any:
    """One environment with Brax's Env interface; arguments and errors as for `load`."""
    return load(config, extra_kwargs, devices).env


def load(config: EnvConfig, extra_kwargs: Mapping[str, Any] | None = None, devices: int = 1) -> Loaded:
    """One environment with Brax's Env interface, and what its physics came to be.

    Args:
        config: Which one, and its constructor's keyword arguments.
        extra_kwargs: Arguments that win over the configuration's, e.g. `eval.env_kwargs`.
        devices: On which it will be stepped at once; where C MuJoCo simulates they share the cores.

    Raises:
        ConfigError: No such environment, class or module, arguments that it does not take, or no physics of that kind.
    """
    kwargs = dict(config.kwargs or {}) | dict(extra_kwargs or {})
    backend = kwargs.pop("backend", config.backend)
    factory = _brax_class(config.name) if config.source == "brax" else environment_factory(config)

    def build(backend: str | None) -> Any:
        return _construct(factory, config.name, kwargs if backend is None else {**kwargs, "backend": backend})

    def native() -> Any:
        try:
            env = build("mjx")  # whose solver options are those for MuJoCo
        except ConfigError:
            env = build(None)
        from rlstable.envs.native import with_native_physics

        try:
            return with_native_physics(env, devices)  # which traces reset and step
        except Exception as error:
            if config.source == "brax" or isinstance(error, Unsupported | ConfigError):
                raise
            raise user_code_error(error, config.name, "reset or step") from error

    if backend == "native":
        try:
            return Loaded(native(), backend)
        except Unsupported as error:
            raise ConfigError(
                f"env.backend: native cannot simulate {config.name}: {error}; "
                "env.backend=null is the environment's own choice, auto takes native where it can"
            ) from error
    if backend != "auto":
        env = build(backend)
        return Loaded(env, getattr(env, "backend", None))
    wanted, reason = ("native" if jax.default_backend() == "cpu" else "mjx"), ""
    try:
        return Loaded(native() if wanted == "native" else build(wanted), wanted)
    except (Unsupported, ConfigError) as error:
        reason = str(error)
    env = build(None)
    return Loaded(env, getattr(env, "backend", None), f"{wanted} cannot simulate {config.name}: {reason}")


def _construct(factory: Any, name: str, kwargs: Mapping[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            # Brax says at every construction that its own engines are not maintained.
            warnings.filterwarnings("ignore", message="Brax System", category=UserWarning)
            env = factory(**kwargs)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no arguments"
        where = location(error) if ":" in name else ""  # in the user's own class
        raise ConfigError(
            f"env.kwargs: {name} cannot be built with {given}: {first_line(error)}{where}; "
            "see env.backend, env.kwargs and eval.env_kwargs"
        ) from error
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise ConfigError(f"env.name: {name} has no method {method}; it must have Brax's Env interface")
    return env


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
