"""Distillation: a policy that reads privileged observations teaches one that does not.

The student acts, and the teacher labels the student's own samples, as in DAgger (Ross et al. 2011, arXiv:1011.0686).
First the student only imitates, then PPO's losses join while the weight of the imitation falls, then PPO trains alone.
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
    """A trained policy whose parameters are constants of the program.

    Attributes:
        statistics: Statistics of the observation that the teacher reads, `[n]`.
    """

    networks: Networks
    params: Params
    statistics: Statistics

    def lesson(self, config: PPOConfig, state: TrainState, observation: Observation) -> Lesson:
        """What the teacher does for a batch of whole observations, and how much that counts in this iteration.

        If `env.history` stacks more observations than the teacher reads, the teacher reads the newest ones.
        """
        key, size = self.networks.config.policy_obs_key, self.statistics.mean.shape[-1]
        own = (observation[key] if isinstance(observation, Mapping) else observation)[..., -size:]
        distribution, _ = self.networks.distribution(self.params, self.statistics, own)
        assert state.tuning.total_steps is not None
        progress = state.counters.env_steps.progress(state.tuning.total_steps)
        falling = (config.imitation_end - progress) / max(config.imitation_end - config.imitation_only, 1e-6)
        weight = config.imitation_weight * jnp.clip(falling, 0.0, 1.0)
        each = jnp.broadcast_to(jnp.stack([weight, progress >= config.imitation_only]), (*own.shape[:-1], 2))
        return Lesson(distribution.applied_action(distribution.loc), each[..., 0], each[..., 1])
