"""MuJoCo Playground's own settings of a task as defaults of the configuration, under the user's overrides.

`configs/ppo/playground.yaml` and `configs/env/playground.yaml` write `${rlstable.playground:<key>}` at every key that
Playground may set. `configs/ppo/playground_cpu.yaml` writes `${rlstable.many_actuators:...}` at keys that differ
with 12 actuators or more, and `${rlstable.short_episodes:...}` at keys that differ with short training episodes.
Playground is imported only if a key of the first two kinds is resolved.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlstable.config import ConfigError
from rlstable.config.defaults import defaults
from rlstable.config.ppo import brax_epochs

# Playground's arguments of `ppo.train` with another key than `ppo.<name>`.
_OTHER_KEYS = {
    "episode_length": "env.episode_length",
    "action_repeat": "env.action_repeat",
    "num_timesteps": "total_steps",
    "num_evals": "eval.num_evals",
    "num_eval_envs": "eval.num_envs",
}
# Tasks that learn more with short training episodes (docs/lab_log.md, 2026-11-28).
_SHORT_EPISODES = ("FingerTurnEasy", "FingerTurnHard", "HumanoidRun", "HumanoidStand", "HumanoidWalk")
# The arguments that Brax rounds the number of steps with.
_ROUNDING = ("batch_size", "unroll_length", "num_minibatches", "num_resets_per_eval", "action_repeat", "num_evals")


def resolve(key: str, _root_: DictConfig) -> Any:
    """The resolver `${rlstable.playground:<key>}`: Playground's value for a key, else the key's default."""
    task = OmegaConf.select(_root_, "env.name")
    if task is None:
        raise ConfigError("env.name: is missing; name a task of MuJoCo Playground, e.g. env.name=CartpoleBalance")
    impl = OmegaConf.select(_root_, "env.impl")
    settings = _settings(str(task), None if impl in (None, "auto") else str(impl))
    if key == "total_steps":
        rounding = {name: OmegaConf.select(_root_, _key(name)) for name in _ROUNDING}
        return _rounded(settings[key], rounding)
    if key in settings:
        return settings[key]
    section, _, name = key.rpartition(".")
    return defaults(section)[name]


def many_actuators(many: float, few: float, _root_: DictConfig) -> float:
    """The resolver `${rlstable.many_actuators:<many>,<few>}`: `many` for locomotion tasks and humanoids."""
    task = OmegaConf.select(_root_, "env.name")
    if OmegaConf.select(_root_, "env.source") != "playground" or task is None:
        return few
    from rlstable.envs.playground import suite_of

    return many if suite_of(task).__name__.endswith(".locomotion") or task.startswith("Humanoid") else few


def short_episodes(yes: int | None, no: int | None, _root_: DictConfig) -> int | None:
    """The resolver `${rlstable.short_episodes:<yes>,<no>}`: `yes` for tasks with short training episodes."""
    return yes if OmegaConf.select(_root_, "env.name") in _SHORT_EPISODES else no


def _key(argument: str) -> str:
    return _OTHER_KEYS.get(argument, f"ppo.{argument}")


@functools.cache
def _settings(task: str, impl: str | None) -> dict[str, Any]:
    """Playground's settings of a task by dotted key, with the meaning they have in rlstable."""
    from rlstable.envs.playground import ppo_settings

    arguments = ppo_settings(task, impl)
    network = arguments.pop("network_factory", {})
    evals = arguments["num_evals"]
    settings = {_key(name): _plain(value) for name, value in arguments.items()}
    # Brax also counts the evaluation before training.
    settings |= {"eval.num_evals": max(evals - 1, 1) if evals else 0, "eval.at_start": evals > 1}
    return settings | {f"network.{name}": _plain(value) for name, value in network.items()}


def _rounded(steps: int, arguments: Mapping[str, int]) -> int:
    """The number of steps that Brax trains; unchanged with an impossible argument, which validation reports."""
    try:
        epochs = brax_epochs({**arguments, "num_timesteps": steps, "num_evals": arguments["num_evals"] + 1})
    except (TypeError, ValueError, ZeroDivisionError):
        return steps
    return epochs.parts * epochs.steps


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
