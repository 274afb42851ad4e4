"""The lists of terms that a task names, as functions with their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rlstable.config.robot import ObservationConfig, TaskConfig
from rlstable.robot import commands, endings, observations, resets, rewards, terms

KEY = "env.task"

Functions = Mapping[str, Callable[..., Any]]


class Lists(NamedTuple):
    """The functions of a task by name, with their parameters."""

    commands: Functions
    observations: Functions
    critic_observations: Functions
    rewards: Functions
    endings: Functions
    reset: Functions

    @classmethod
    def of(cls, task: TaskConfig) -> Lists:
        return cls(
            terms.found(commands.TERMS, f"{KEY}.commands", task.commands),
            terms.found(observations.TERMS, f"{KEY}.observations", task.observations),
            terms.found(observations.TERMS, f"{KEY}.critic_observations", seen_by_critic(task)),
            terms.found(rewards.TERMS, f"{KEY}.rewards", task.rewards),
            terms.found(endings.TERMS, f"{KEY}.endings", task.endings),
            terms.found(resets.TERMS, f"{KEY}.reset", task.reset),
        )

    def keyed(self) -> dict[str, Functions]:
        """The lists by their key in the configuration."""
        return {f"{KEY}.{name}": functions for name, functions in self._asdict().items()}

    def every(self) -> dict[str, Callable[..., Any]]:
        """All terms by their key in the configuration."""
        return {f"{key}.{name}": f for key, functions in self.keyed().items() for name, f in functions.items()}


def seen_by_critic(task: TaskConfig) -> Mapping[str, ObservationConfig]:
    """Observation terms of the critic, the policy's without noise and delay; empty without `critic_observations`."""
    shared = {name: own.model_copy(update={"noise": 0.0, "delay": (0, 0)}) for name, own in task.observations.items()}
    return shared | task.critic_observations if task.critic_observations else {}
