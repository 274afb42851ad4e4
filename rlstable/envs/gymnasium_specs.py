"""Facts about Gymnasium's MuJoCo tasks, read from the installed package: model file, time limit, arguments."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstable.config import ConfigError
from rlstable.config.extras import install

NAMES = (
    "Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "HumanoidStandup-v5", "InvertedDoublePendulum-v5",
    "InvertedPendulum-v5", "Pusher-v5", "Reacher-v5", "Swimmer-v5", "Walker2d-v5",
)  # fmt: skip
_FORMULA_ONLY = ("self", "kwargs", "xml_file", "frame_skip", "default_camera_config")  # no numbers of the formulas


class Spec(NamedTuple):
    """A task as Gymnasium registers it."""

    model_file: Path
    frame_skip: int  # physics steps per action
    episode_length: int  # actions until the time limit
    arguments: dict[str, Any]  # numbers of the formulas by Gymnasium's argument names, with the task's defaults


def spec_of(name: str, kwargs: Mapping[str, object] | None = None) -> Spec:
    """The facts of a task, with `kwargs` in place of its arguments.

    Raises `ConfigError` if Gymnasium is missing or too old, or has no such task or argument.
    """
    if name not in NAMES:
        close = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.7)
        other = f"choose one of {', '.join(NAMES)}, or write the task as a class and use env=import (docs/python.md)"
        hint = f"did you mean {close[0]}?" if close else other
        raise ConfigError(f"env.name: rlstable has no formula of Gymnasium's task {name!r}; {hint}")
    if importlib.util.find_spec("gymnasium") is None:
        raise ConfigError(f"env: gymnasium is not installed; {install('gymnasium')}")
    registry = importlib.import_module("gymnasium.envs.registration").registry
    if name not in registry:
        raise ConfigError(f"env: this version of gymnasium has no task {name}; {install('gymnasium')} --upgrade")
    registered = registry[name]
    module, _, attribute = registered.entry_point.partition(":")
    try:
        task = getattr(importlib.import_module(module), attribute)
    except ImportError as error:  # Gymnasium's MuJoCo tasks import packages that Gymnasium alone does not install
        raise ConfigError(f"env: {name} needs {error.name}, which is not installed; {install('gymnasium')}") from error
    defaults = {name: one.default for name, one in inspect.signature(task.__init__).parameters.items()}
    arguments = {key: value for key, value in defaults.items() if key not in _FORMULA_ONLY}
    given = dict(kwargs or {})
    for key in sorted(given.keys() - arguments.keys()):
        close = difflib.get_close_matches(key, arguments, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(arguments)) or 'none'}"
        raise ConfigError(f"env.kwargs: {name} has no argument {key!r}; {hint}")
    folder = Path(str(importlib.util.find_spec("gymnasium.envs.mujoco").submodule_search_locations[0])) / "assets"  # type: ignore[union-attr,index]
    return Spec(
        folder / defaults["xml_file"], defaults["frame_skip"], registered.max_episode_steps, {**arguments, **given}
    )
