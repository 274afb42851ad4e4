"""Private names of libraries, and what rlstable does with a version of the library that lacks the name.

A test finds private names in any other file of the package. The module imports a library only when it is asked for it.

| library | private name | without the name |
| --- | --- | --- |
| JAX | `distributed.global_state` | a run of several processes ends with one line |
| JAX | `xla_bridge.backends_are_initialized` | JAX's own error, if JAX is in use before the processes connect |
| JAX | `clusters.ClusterEnv` | clusters are not detected: set `distributed.coordinator` and so on |
| Hydra | `utils.get_args_parser` | Hydra prints its own help for an unknown flag |
| Python | `ArgumentParser._check_help` | nothing: Python before 3.14 does not check the help of Hydra's flags |
| Brax | `envs._envs` | one line that asks for another version of Brax |
| Brax | `PipelineEnv._pipeline` | no native physics: `env.backend=auto` simulates with MJX |
| MJX | `io.jax` | one line, only in a run of several processes |
| MJX | `Data._impl` | the arrays are read from the data itself |
| MJX | `Option._impl` | MJX-Warp prints a line for each solver that reaches its limit |
| Playground | `MjxEnv._mjx_model` | domain randomisation of its tasks ends with one line |
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
from typing import Any

from rlstable.config.schema import ConfigError
from rlstable.device.trees import PyTree

BRAX_PIPELINE = "_pipeline"
# Fields with the model that domain randomisation replaces: Brax's environments, and Playground's tasks.
RANDOMIZED_FIELDS = ("sys", "_mjx_model", "mjx_model")


def coordination() -> Any:
    """JAX's coordination service: `client`, `process_id` and `num_processes`; ConfigError if this JAX has none."""
    state = _private("jax._src.distributed", "global_state")
    if not all(hasattr(state, name) for name in ("client", "process_id", "num_processes")):
        raise _unknown_version("distributed", "jax", "train with one process")
    return state


def backends_are_initialized() -> bool:
    """Whether JAX has initialised a device; False if this version of JAX cannot say."""
    function = _private("jax._src.xla_bridge", "backends_are_initialized")
    return function is not None and bool(function())


def processes_of_cluster() -> int | None:
    """Number of processes of the cluster that JAX detects; None outside of one."""
    cluster_env = _private("jax._src.clusters", "ClusterEnv")
    kinds = getattr(cluster_env, "_cluster_types", ())
    cluster = next((kind for kind in kinds if not kind.opt_in_only_method and kind.is_env_present()), None)
    return None if cluster is None else int(cluster.get_process_count())


def hydra_flags() -> argparse.ArgumentParser | None:
    """The parser of Hydra's flags; None if this version of Hydra has none under a known name.

    Call it before Hydra reads the command line: with Python 3.14 Hydra cannot make the parser otherwise.
    """
    _check_only_texts()
    function = _private("hydra._internal.utils", "get_args_parser")
    return None if function is None else function()


def _check_only_texts() -> None:
    """Lets Python 3.14 accept the help of Hydra 1.3's `--shell-completion`, an object in place of a text."""
    check = getattr(argparse.ArgumentParser, "_check_help", None)
    if check is None or check.__module__ == __name__:
        return

    def check_text(self: argparse.ArgumentParser, action: argparse.Action) -> None:
        if isinstance(action.help, str):
            check(self, action)

    setattr(argparse.ArgumentParser, "_check_help", check_text)  # noqa: B010 - mypy knows no such name


def brax_environments() -> dict[str, type]:
    """Brax's environments by name; ConfigError if this version of Brax has no such name."""
    environments: dict[str, type] | None = _private("brax.envs", "_envs")
    if environments is None:
        raise _unknown_version("env", "brax", "give the class: env=import env.name=brax.envs.ant:Ant")
    return environments


def mjx_io() -> Any:
    """The module of MJX that puts models on a device; ConfigError if this version of MJX has no such module."""
    module = _private("mujoco.mjx._src", "io")
    if not hasattr(module, "jax"):
        raise _unknown_version("distributed", "mujoco-mjx", "train with one process")
    return module


def mjx_arrays(data: PyTree) -> PyTree:
    """The object with the arrays of one implementation of MJX, contacts among them; `data` itself for other physics."""
    return getattr(data, "_impl", data)


def without_solver_lines(model: Any) -> Any:
    """A model of MJX-Warp that does not print when a solver reaches its limit of iterations.

    Models for training have few iterations on purpose, and the kernels print a line for every such environment and
    step. Other models are returned as they are.
    """
    own: Any = getattr(model.opt, "_impl", None)
    if not hasattr(own, "warn_overflow"):
        return model
    from mujoco.mjx.third_party.mujoco_warp import OverflowType

    shown = own.warn_overflow & ~int(OverflowType.ITERATIONS | OverflowType.LS_ITERATIONS)
    return model.replace(opt=model.opt.replace(_impl=own.replace(warn_overflow=shown)))


def _private(module: str, name: str) -> Any:
    """A name of a module; None if either is gone."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name) and error.name != module.partition(".")[0]:
            return None
        raise
    if hasattr(found, name):
        return getattr(found, name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return None


def _unknown_version(key: str, package: str, otherwise: str) -> ConfigError:
    version = importlib.metadata.version(package)
    return ConfigError(f"{key}: rlstable does not know {package} {version}; install an older {package}, or {otherwise}")
