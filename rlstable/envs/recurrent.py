"""Keeps the state of a recurrent policy in the environment: a part of the observation and of the action.

The policy appends its new state to the action, and finds the state in the next observation. So whatever carries, resets
and restores environments does the same with the policy's state: episode ends, quarantine, checkpoints and incidents.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rlstable.config.networks import NetworkConfig
from rlstable.device.trees import MEMORY, Env, EnvState, Observation
from rlstable.envs.wrapper import EnvWrapper


class RecurrentEnv(EnvWrapper):
    """An environment whose observations and actions include the state of a recurrent policy, 0 at a reset."""

    def __init__(self, env: Env, network: NetworkConfig):
        super().__init__(env)
        self._size = network.recurrent_size
        self._keys = (network.policy_obs_key, network.value_obs_key)
        self._named = isinstance(jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs, Mapping)

    def reset(self, rng: jax.Array) -> EnvState:
        state = self.env.reset(rng)
        return state.replace(obs=self._with(state.obs, jnp.zeros(self._size, jnp.float32)))

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        own, memory = jnp.split(action, [self.env.action_size], axis=-1)
        stepped = self.env.step(state.replace(obs=self._without(state.obs)), own)
        return stepped.replace(obs=self._with(stepped.obs, memory))

    def _with(self, observation: Observation, memory: jax.Array) -> Observation:
        parts = observation if self._named else dict.fromkeys(self._keys, observation)
        return {**parts, MEMORY: memory}

    def _without(self, observation: Observation) -> Observation:
        if not self._named:
            return observation[self._keys[0]]
        return {key: x for key, x in observation.items() if key != MEMORY}


def with_memory(env: Env, network: NetworkConfig) -> Env:
    """The environment for a policy of these networks; the environment itself if they are not recurrent."""
    return env if network.recurrent is None else RecurrentEnv(env, network)
