"""Settings of an iteration, from the configuration of a run."""

from __future__ import annotations

import dataclasses

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    """Two sections of the configuration, and what follows from others.

    Attributes:
        env_steps_per_iteration: Environment steps, over all devices and with action repeat.
        tightens: Whether `Tuning.clip_scale` tightens the bounds of ratio, value and distance.
        watches_policy: Whether a guard judges the distance of the policy.
        captures: Whether the state before a bad step is kept for an incident.
        staggered: Whether the first episode of an environment is not whole.
    """

    ppo: PPOConfig
    limits: LimiterConfig
    env_steps_per_iteration: int
    total_steps: int
    tightens: bool = False
    watches_policy: bool = False
    captures: bool = False
    staggered: bool = False
