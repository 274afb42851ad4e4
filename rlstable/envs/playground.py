"""Loads tasks of MuJoCo Playground by name, with the task's own settings and its own domain randomisation."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import io
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.config.run import EnvConfig
from rlstable.config.schema import first_line, flat
from rlstable.device.compatibility import RANDOMIZED_FIELDS, without_solver_lines
from rlstable.device.mjx import implementation
from rlstable.envs import menagerie
from rlstable.envs.patches import repair_clip

if TYPE_CHECKING:  # the command imports this module before JAX
    from rlstable.device.trees import Env
    from rlstable.envs.randomized import RandomizationFn

_PACKAGE = "mujoco_playground"
_SUITES = ("dm_control_suite", "locomotion", "manipulation")


def load_task(config: EnvConfig, kwargs: Mapping[str, object], impl: str | None = None) -> Env:
    """Loads a task, with `kwargs` as Playground's `config_overrides`, nested or with dotted keys.

    The task keeps its own `episode_length`, which some tasks read: training counts `env.episode_length` itself.
    Raises `ConfigError` if the task, an override or a needed file does not exist, or the task has pixels.
    """
    suite = suite_of(config.name)
    settings = suite.get_default_config(config.name)
    overrides = flat(kwargs)
    known = flat(settings.to_dict())
    for key in sorted(overrides.keys() - known.keys()):
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(known))}"
        raise ConfigError(f"env.kwargs: {config.name} has no setting {key!r}; {hint}")
    if "impl" in overrides:
        raise ConfigError(f"env.kwargs: set env.impl={overrides['impl']} instead of impl in env.kwargs")
    if "impl" in settings:
        overrides.setdefault("impl", impl or implementation(config.impl))
    elif config.impl != "auto":
        raise ConfigError(
            f"env.impl: {config.name} does not let you choose the implementation of MJX; set env.impl=auto"
        )
    if overrides.get("vision", settings.get("vision", False)):
        raise ConfigError("env.kwargs: rlstable does not train on pixels; leave vision=false")
    loader = _module("registry").mjx_env
    if suite is not _module(_SUITES[0]) and not loader.MENAGERIE_PATH.exists():  # Playground would clone it
        loader.MENAGERIE_PATH = menagerie.Menagerie()
    try:
        with quiet():
            task = suite.load(config.name, config_overrides=overrides)
    except ConfigError:
        raise
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        raise ConfigError(
            f"env.kwargs: Playground cannot build {config.name} with {shown}: {type(error).__name__}: "
            f"{first_line(error)}; change env.kwargs, eval.env_kwargs or env.impl; for files of Menagerie that a clone "
            f"lacks, delete the clone, and {install('menagerie')}"
        ) from error
    repair_clip(task)
    for field in RANDOMIZED_FIELDS:
        if overrides.get("impl") == "warp" and field in vars(task):
            setattr(task, field, without_solver_lines(getattr(task, field)))
    return task


def require_mujoco(config: EnvConfig) -> None:
    """Raises ConfigError if the backend is one of Brax's own engines, for a task that has only MuJoCo's physics."""
    if config.backend not in (None, "auto", "native", "mjx"):
        raise ConfigError(
            f"env.backend: {config.backend} is for Brax's environments; choose auto, native or mjx for "
            f"env={config.source}"
        )


def randomizer(name: str) -> RandomizationFn:
    """The task's own domain randomisation, `(model, rng) -> (model_v, in_axes)`; a ConfigError if it has none."""
    suite_of(name)
    with quiet():
        function = _module("registry").get_domain_randomizer(name)
    if function is None:
        raise ConfigError(
            f"env.randomize: Playground has no randomisation for {name}; set env.randomize=false, or give a function "
            "of your own: env.randomization_fn=package.module:function"
        )
    return function


def ppo_settings(name: str, impl: str | None) -> dict[str, Any]:
    """Playground's own arguments of Brax's `ppo.train` for a task; a `ConfigError` without the task or settings."""
    suite = suite_of(name).__name__.rpartition(".")[2]
    try:
        return _module(f"config.{suite}_params").brax_ppo_config(name, impl).to_dict()
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"ppo: Playground has no settings of PPO for {name}; set ppo=default, env.episode_length, "
            "env.action_repeat, network.policy_obs_key and network.value_obs_key"
        ) from error


def suite_of(name: str) -> types.ModuleType:
    """The module of the suite that has a task; raises a ConfigError if there is none."""
    suites = [_module(suite) for suite in _SUITES]
    for suite in suites:
        if name in suite.ALL_ENVS:
            return suite
    names = [task for suite in suites for task in suite.ALL_ENVS]
    # Names in lower case, because a wrong case is the most common mistake.
    by_lower = {task.lower(): task for task in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[close[0]]}?" if close else f"choose one of {', '.join(sorted(names))}"
    raise ConfigError(f"env.name: MuJoCo Playground has no task {name!r}; {hint}")


def _module(name: str) -> Any:
    """A module of Playground; raises a ConfigError if it is not installed, or cannot be imported."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError(f"env: MuJoCo Playground is not installed; {install('playground')}")
    try:
        with quiet():
            found = getattr(importlib.import_module(_PACKAGE), name, None)
            return importlib.import_module(f"{_PACKAGE}.{name}") if found is None else found
    except Exception as error:
        raise ConfigError(
            f"env: MuJoCo Playground cannot be imported: {type(error).__name__}: {first_line(error)}; "
            f"{install('playground')} --upgrade"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discards what Playground and MJX print: missing optional modules, downloads and missing randomisations."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
