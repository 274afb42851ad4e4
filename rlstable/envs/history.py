"""Observation history: an environment whose observation is a stack of its last observations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.device.trees import Env, EnvState, Observation
from rlstable.envs.wrapper import EnvWrapper


class HistoryEnv(EnvWrapper):
    """An environment with the last `length` observations in one vector, the oldest first, the newest last.

    At a reset every place of the stack has the first observation. In a dictionary of observations every vector is
    stacked. The observation itself is the only memory, so that an automatic reset, a quarantine, a checkpoint and an
    incident carry the history with the observation.
    """

    def __init__(self, env: Env, length: int):
        super().__init__(env)
        self.length = length

    def reset(self, rng: jax.Array) -> EnvState:
        state = self.env.reset(rng)
        return state.replace(obs=jax.tree.map(self._tiled, state.obs))

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        stepped = self.env.step(state.replace(obs=self.newest(state.obs)), action)
        return stepped.replace(obs=jax.tree.map(_appended, state.obs, stepped.obs))

    def newest(self, stack: Observation) -> Observation:
        """The newest observation of a stack, without a batch axis."""
        return jax.tree.map(lambda x: x[-(x.shape[0] // self.length) :] if jnp.ndim(x) == 1 else x, stack)

    def _tiled(self, observation: jax.Array) -> jax.Array:
        return jnp.tile(observation, self.length) if jnp.ndim(observation) == 1 else observation


def with_history(env: Env, length: int) -> Env:
    """The environment with stacked observations; the environment itself for a length of 1."""
    return env if length == 1 else HistoryEnv(env, length)


def without_history(env: Env) -> Env:
    """The environment inside a `HistoryEnv`; other environments as they are."""
    return env.env if isinstance(env, HistoryEnv) else env


def _appended(stack: jax.Array, observation: jax.Array) -> jax.Array:
    if jnp.ndim(observation) != 1:
        return observation
    return jnp.concatenate([stack[observation.shape[-1] :], jnp.asarray(observation, stack.dtype)])
