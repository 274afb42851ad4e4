"""Distillation: a policy that reads privileged observations labels the samples of one that does not.

The student acts, as in DAgger (Ross et al. 2011, arXiv:1011.0686). First the student only imitates, then PPO's losses
join while the weight of the imitation falls, then PPO trains alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device.trees import Observation, Params
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Lesson
from rlstable.ppo.state import TrainState


@dataclasses.dataclass(frozen=True, eq=False)
class Teacher:
    """A trained policy, a constant of the program; `statistics` are those of the observation that it reads, `[n]`."""

    networks: Networks
    params: Params
    statistics: Statistics

    def lesson(self, config: PPOConfig, state: TrainState, observation: Observation) -> Lesson:
        """The teacher's actions for whole observations, the newest of a stack, and their weight in this iteration."""
        key, size = self.networks.config.policy_obs_key, self.statistics.mean.shape[-1]
        own = (observation[key] if isinstance(observation, Mapping) else observation)[..., -size:]
        distribution, _ = self.networks.distribution(self.params, self.statistics, own)
        assert state.tuning.total_steps is not None
        progress = state.counters.env_steps.progress(state.tuning.total_steps)
        only, end = config.imitation_only, config.imitation_end
        weight = config.imitation_weight * jnp.clip((end - progress) / max(end - only, 1e-6), 0.0, 1.0)
        weight, practice = (jnp.broadcast_to(x, own.shape[:-1]) for x in (weight, progress >= only))
        return Lesson(distribution.applied_action(distribution.loc), weight, practice)
