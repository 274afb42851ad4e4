"""Loads one environment: from Brax, MuJoCo Playground or Gymnasium, by import path or from a robot's model."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line
from rlstable.device import compatibility
from rlstable.device.mjx import implementation
from rlstable.device.trees import Env
from rlstable.envs import playground
from rlstable.envs.history import with_history
from rlstable.envs.imported import environment_factory, randomization_fn
from rlstable.envs.interface import location, require_unwrapped, user_code_error
from rlstable.envs.mujoco_batch import Unsupported
from rlstable.envs.mujoco_model import model_of, without_warnings
from rlstable.envs.patches import repair_fluid_model, use_own_devices, without_copies
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
    if config.source == "object":
        raise ConfigError(
            f"env.source: this run was trained on an environment object of {config.name}; pass the object in Python: "
            "rlstable.fit(env, overrides=['resume=<folder>'])"
        )
    if config.source in _MUJOCO:
        playground.require_mujoco(config)
    if config.source != "import":
        with playground.quiet():  # MJX prints that the optional warp-lang is missing
            importlib.import_module("mujoco.mjx")
    use_own_devices()
    kwargs = dict(config.kwargs or {}) | dict(extra_kwargs or {})
    if config.source == "robot" and kwargs:
        raise ConfigError("env.kwargs: a robot has none; change env.task, and leave eval.env_kwargs=null")
    backend = kwargs.pop("backend", config.backend) if config.source in ("brax", "import") else config.backend
    if backend == "auto" and config.impl != "auto":
        backend = "mjx"  # a chosen implementation of MJX asks for MJX
    randomization = _randomization(config) if randomize and config.is_randomized else None
    loaded = _Loader(config, _factory(config, kwargs), randomization, devices).load(backend)
    return loaded._replace(env=with_history(loaded.env, config.history))


@dataclasses.dataclass(frozen=True)
class _Loader:
    """Builds an environment with a physics backend, and chooses the backend for `env.backend=auto`.

    Arguments of the `factory` are the backend, where `native` is an environment of MJX whose physics C MuJoCo will
    replace, and whether the model of MJX is needed.
    """

    config: EnvConfig
    factory: Callable[[str | None, bool], Env]
    randomization: RandomizationFn | None
    devices: int

    def load(self, backend: str | None) -> Loaded:
        name, source = self.config.name, self.config.source
        if backend == "native":
            # A program of an accelerator cannot call C MuJoCo in its own memory.
            if (platform := jax.default_backend()) != "cpu":
                raise ConfigError(
                    f"env.backend: native steps C MuJoCo on a CPU, but JAX uses a {platform} here; "
                    "set env.backend=auto for physics on that device, or JAX_PLATFORMS=cpu to train on the CPU"
                )
            try:
                return self._native(chosen=True)
            except Unsupported as error:
                raise ConfigError(
                    f"env.backend: native cannot simulate {name}: {error}; "
                    "set env.backend=auto for native where possible, or null for the environment's default"
                ) from error
        if backend != "auto":
            return self._build(backend)
        preferred = "native" if jax.default_backend() == "cpu" else "mjx"
        try:
            return self._native() if preferred == "native" else self._build(preferred)._replace(backend=preferred)
        except (Unsupported, ConfigError) as error:
            if source in _MUJOCO and isinstance(error, ConfigError):
                raise  # MJX would have the same error
            reason = f"{preferred} cannot simulate {name}: {error}"
        # The model that a user randomises is mostly of MJX.
        own = self._build(None if self.randomization is None else "mjx")
        # A user's class that is no MuJoCo model, or that uses MJX without being asked, has no other choice.
        as_it_is = source == "import" and (own.backend == preferred or model_of(own.env) is None)
        return own if as_it_is else own._replace(fallback_reason=reason)

    def _build(self, backend: str | None) -> Loaded:
        # MuJoCo warns about models of Brax, Playground and Gymnasium, which the user cannot mend.
        own = self.config.source in ("robot", "import")
        with contextlib.nullcontext() if own else without_warnings():
            env = self.factory(backend, backend != "native" or self.randomization is not None)
        require_unwrapped(env)
        env = env if self.randomization is None else RandomizedEnv(env, self.randomization)
        return Loaded(env, "mjx" if self.config.source in _MUJOCO else getattr(env, "backend", None))

    def _native(self, chosen: bool = False) -> Loaded:
        """The environment with C MuJoCo; `chosen` by the user and not by `auto`."""
        loaded, source = self._build("native"), self.config.source
        env = loaded.env
        if model_of(getattr(env, "unwrapped", env)) is None:  # before the import of Brax, which takes seconds
            raise Unsupported("it has no MuJoCo model")
        from rlstable.envs.native import with_native_physics

        try:
            env = with_native_physics(env, self.devices)  # traces reset and step
        except Exception as error:
            if source in ("brax", "gymnasium") or isinstance(error, Unsupported | ConfigError):
                raise
            if chosen and source == "import":
                raise user_code_error(error, self.config.name, "reset or step") from error
            raise Unsupported(f"{type(error).__name__}: {first_line(error)}") from error  # MJX may still work
        return loaded._replace(env=env, backend="native")


def _factory(config: EnvConfig, kwargs: Mapping[str, object]) -> Callable[[str | None, bool], Env]:
    """`_Loader.factory` of the environment's source."""
    if config.source == "playground":  # the model of C MuJoCo is the one of MJX in JAX
        return lambda backend, _: playground.load_task(config, kwargs, "jax" if backend == "native" else None)
    if config.source == "gymnasium":
        return functools.partial(_gymnasium_task, config, kwargs)
    if config.source == "robot":
        from rlstable.robot.environment import RobotEnv

        assert config.task is not None  # the configuration has checked it
        xml, task = config.model_file, config.task
        chosen = lambda backend: "jax" if backend == "native" else implementation(config.impl)  # noqa: E731
        return lambda backend, with_mjx: RobotEnv(xml, task, chosen(backend) if with_mjx else None)
    own = _brax_class(config.name) if config.source == "brax" else environment_factory(config)
    return lambda backend, _: _build(own, config, kwargs, backend)


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


def _gymnasium_task(config: EnvConfig, kwargs: Mapping[str, object], _: str | None, with_mjx: bool) -> Env:
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


def _brax_class(name: str) -> Callable[..., Env]:
    repair_fluid_model()
    registry = compatibility.brax_environments()
    if name not in registry:
        close = difflib.get_close_matches(name, list(registry), n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(sorted(registry))}"
        raise ConfigError(f"env.name: Brax has no environment {name!r}; {hint}")
    return registry[name]
