"""Loads one environment: from Brax, MuJoCo Playground or Gymnasium, by import path or from a robot's model."""

from __future__ import annotations

import contextlib
import difflib
import io
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from rlstable.compilation import compatibility
from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line
from rlstable.device.trees import Env
from rlstable.envs import playground
from rlstable.envs.history import with_history
from rlstable.envs.imported import environment_factory, randomization_fn
from rlstable.envs.interface import location, require_unwrapped, user_code_error
from rlstable.envs.mujoco_batch import Unsupported
from rlstable.envs.mujoco_model import model_of
from rlstable.envs.patches import repair_fluid_model, use_own_devices, without_copies
from rlstable.envs.playground import require_mujoco
from rlstable.envs.randomized import RandomizationFn, RandomizedEnv

_MUJOCO = ("gymnasium", "playground", "robot")  # sources whose environments simulate with MuJoCo, in MJX if not in C


class Loaded(NamedTuple):
    """An environment and its physics backend."""

    env: Env
    backend: str | None  # value of `env.backend`; None if the environment offers no choice
    fallback_reason: str | None = None  # why `env.backend=auto` did not use the preferred backend; None if it did


def load_env(config: EnvConfig, extra_kwargs: Mapping[str, object] | None = None, randomize: bool = True) -> Env:
    return load(config, extra_kwargs, randomize=randomize).env


def load(
    config: EnvConfig, extra_kwargs: Mapping[str, object] | None = None, devices: int = 1, randomize: bool = True
) -> Loaded:
    """Loads an environment, chooses its physics backend and, with `randomize`, randomises its model as configured.

    `extra_kwargs` override `env.kwargs`. `devices` step the environment at the same time; with C MuJoCo they share the
    CPU cores. Raises `ConfigError` if there is no such environment, or if it does not accept the configuration.
    """
    loaded = _without_history(config, extra_kwargs, devices, randomize)
    return loaded._replace(env=with_history(loaded.env, config.history))


def _without_history(
    config: EnvConfig, extra_kwargs: Mapping[str, object] | None, devices: int, randomize: bool
) -> Loaded:
    if config.source == "object":
        raise ConfigError(
            f"env.source: this run was trained on an environment object of {config.name}; pass the object in Python: "
            "rlstable.fit(env, overrides=['resume=<folder>'])"
        )
    use_own_devices()
    randomization = None
    if randomize and config.is_randomized:
        randomization = _randomization(config)
    kwargs = dict(config.kwargs or {}) | dict(extra_kwargs or {})
    if config.source == "gymnasium":
        backend = config.backend
        require_mujoco(config)
    elif config.source == "playground":
        # A chosen implementation of MJX asks for MJX.
        backend = "mjx" if config.backend == "auto" and config.impl != "auto" else config.backend
    elif config.source == "robot":
        backend = config.backend
        require_mujoco(config)
        if kwargs:
            raise ConfigError("env.kwargs: a robot has none; change env.task, and leave eval.env_kwargs=null")
    else:
        backend = kwargs.pop("backend", config.backend)
        factory = _brax_class(config.name) if config.source == "brax" else environment_factory(config)

    def build(backend: str | None) -> Loaded:
        if config.source == "playground":  # the model of C MuJoCo is the one of MJX in JAX
            env = playground.load_task(config, kwargs, "jax" if backend == "native" else None)
        elif config.source == "gymnasium":
            env = _gymnasium_task(config, kwargs, backend != "native" or randomization is not None)
        elif config.source == "robot":
            env = _robot(config, with_mjx=backend != "native" or randomization is not None)
        else:
            env = _build(factory, config, kwargs, backend)
        require_unwrapped(env)
        env = env if randomization is None else RandomizedEnv(env, randomization)
        own = "mjx" if config.source in _MUJOCO else getattr(env, "backend", None)
        return Loaded(env, own)

    def native() -> Loaded:
        loaded = build("native")
        env = loaded.env
        if model_of(getattr(env, "unwrapped", env)) is None:  # before the import of Brax, which takes seconds
            raise Unsupported("it has no MuJoCo model")
        from rlstable.envs.native import with_native_physics

        try:
            return loaded._replace(env=with_native_physics(env, devices), backend="native")  # traces reset and step
        except Exception as error:
            if config.source in ("brax", "gymnasium") or isinstance(error, Unsupported | ConfigError):
                raise
            if backend == "native" and config.source == "import":
                raise user_code_error(error, config.name, "reset or step") from error
            raise Unsupported(f"{type(error).__name__}: {first_line(error)}") from error  # MJX may still work

    if backend == "native":
        # A program of an accelerator cannot call C MuJoCo in its own memory.
        if (platform := jax.default_backend()) != "cpu":
            raise ConfigError(
                f"env.backend: native steps C MuJoCo on a CPU, but JAX uses a {platform} here; "
                "set env.backend=auto for physics on that device, or JAX_PLATFORMS=cpu to train on the CPU"
            )
        try:
            return native()
        except Unsupported as error:
            raise ConfigError(
                f"env.backend: native cannot simulate {config.name}: {error}; "
                "set env.backend=auto for native where possible, or null for the environment's default"
            ) from error
    if backend != "auto":
        return build(backend)
    preferred = "native" if jax.default_backend() == "cpu" else "mjx"
    try:
        return native() if preferred == "native" else build(preferred)._replace(backend=preferred)
    except (Unsupported, ConfigError) as error:
        if config.source in _MUJOCO and isinstance(error, ConfigError):
            raise  # MJX would have the same error
        reason = f"{preferred} cannot simulate {config.name}: {error}"
    # The model that a user randomises is mostly of MJX.
    own = build(None if randomization is None else "mjx")
    # A user's class that is no MuJoCo model, or that uses MJX without being asked, has no other choice.
    as_it_is = config.source == "import" and (own.backend == preferred or model_of(own.env) is None)
    return own if as_it_is else own._replace(fallback_reason=reason)


def _build(factory: Callable[..., Env], config: EnvConfig, kwargs: Mapping[str, object], backend: str | None) -> Env:
    """An environment of Brax or of the user; for C MuJoCo with the physics still to replace."""
    name = config.name
    if backend == "native":
        try:
            env = _build(factory, config, kwargs, "mjx")  # sets the solver options that suit MuJoCo
        except ConfigError:
            env = _build(factory, config, kwargs, None)
        chosen_by_class = config.source == "import" and config.backend == "auto" and model_of(env) is not None
        if chosen_by_class and (own := getattr(env, "backend", "mjx")) != "mjx":
            raise Unsupported(f"its class simulates with {own}")
        return env
    kwargs = kwargs if backend is None else {**kwargs, "backend": backend}
    try:
        with warnings.catch_warnings():
            # Brax warns at every construction that its engines are not maintained.
            warnings.filterwarnings("ignore", message="Brax System", category=UserWarning)
            with without_copies():
                env = factory(**kwargs)
    except Exception as error:
        arguments = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no arguments"
        where = location(error) if ":" in name else ""  # only in a user's class
        raise ConfigError(
            f"env.kwargs: {name} cannot be built with {arguments}: {first_line(error)}{where}; "
            "change env.backend, env.kwargs or eval.env_kwargs"
        ) from error
    for method in ("reset", "step"):
        if not callable(getattr(env, method, None)):
            raise ConfigError(f"env.name: {name} has no method {method}; it must have Brax's Env interface")
    return env


def _gymnasium_task(config: EnvConfig, kwargs: Mapping[str, object], with_mjx: bool) -> Env:
    """A task of Gymnasium; `with_mjx` makes the model of MJX, which MJX and domain randomisation need."""
    from rlstable.envs.gymnasium_env import GymnasiumEnv

    task = GymnasiumEnv(config.name, **kwargs)
    if with_mjx:
        task.make_mjx_model()
    return task


def _randomization(config: EnvConfig) -> RandomizationFn:
    if config.task is not None and config.task.is_randomized:
        from rlstable.robot.randomization import by_ranges

        return by_ranges(config.task.randomization)
    return playground.randomizer(config.name) if config.randomize else randomization_fn(config)


def _robot(config: EnvConfig, with_mjx: bool) -> Env:
    from rlstable.robot.environment import RobotEnv

    assert config.xml is not None and config.task is not None  # the configuration has checked it
    return RobotEnv(config.kept_xml or config.xml, config.task, with_mjx)


def _brax_class(name: str) -> Callable[..., Env]:
    with contextlib.redirect_stdout(io.StringIO()):  # MJX prints that the optional warp-lang is missing
        repair_fluid_model()
        registry = compatibility.brax_environments()
    if name not in registry:
        close = difflib.get_close_matches(name, list(registry), n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(sorted(registry))}"
        raise ConfigError(f"env.name: Brax has no environment {name!r}; {hint}")
    return registry[name]
