"""Probe environments, whose value function and best policy are known by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from toys import Physics, State


class Probe:
    """One-step episodes on a scalar observation; subclasses define observation, reward and end."""

    action_size = 1
    backend = "toy"
    observation_size = 1

    def first(self, key: jax.Array) -> jax.Array:
        return jnp.zeros(())

    def pay(self, position: jax.Array, action: jax.Array, key: jax.Array) -> jax.Array:
        raise NotImplementedError

    def following(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next position, and 1.0 if the episode ends."""
        return position, jnp.ones(())

    def reset(self, rng: jax.Array) -> State:
        return self._state(self.first(rng), jnp.zeros(()), jnp.zeros(()), {"key": rng})

    def step(self, state: State, action: jax.Array) -> State:
        key, own = jax.random.split(state.info["key"])
        position = state.pipeline_state.q[0]
        reward = self.pay(position, action[0], own)
        position, done = self.following(position)
        return self._state(position, reward, done, {**state.info, "key": key})

    def _state(self, position: jax.Array, reward: jax.Array, done: jax.Array, info: dict[str, Any]) -> State:
        physics = Physics(q=position[None], qd=jnp.zeros(1), warm_start=jnp.zeros(1))
        return State(physics, position[None], reward, done, {}, info)


class ObservationActionReward(Probe):
    """The reward is 1 - (a - o/2)^2 for o in -1, 1: the best action is o/2."""

    def first(self, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.uniform(key) < 0.5, -1.0, 1.0)

    def pay(self, position: jax.Array, action: jax.Array, key: jax.Array) -> jax.Array:
        return 1.0 - jnp.square(action - position / 2)


class TwoSteps(Probe):
    """The reward is 0 at position 0, then 1 at position 1: V(1) = 1 and V(0) is the discount.

    A third of all rewards is NaN, which changes no value if a guard rejects these rewards.
    """

    def pay(self, position: jax.Array, action: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.uniform(key) < 1 / 3, jnp.nan, position)

    def following(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        return position + 1.0, position


class Recall(Probe):
    """The first observation is -1 or 1, then there is none: the reward after the second action is 1 - (a - o)^2.

    The first action pays nothing. With memory the best return is 1. Without it the best last action is 0, which
    pays 0.
    """

    def first(self, key: jax.Array) -> jax.Array:
        return jnp.where(jax.random.uniform(key) < 0.5, -1.0, 1.0)

    def pay(self, position: jax.Array, action: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.where(jnp.abs(position) > 1.5, 1.0 - jnp.square(action - position / 2), 0.0)

    def following(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 2 * position, (jnp.abs(position) > 1.5).astype(jnp.float32)

    def _state(self, position: jax.Array, reward: jax.Array, done: jax.Array, info: dict[str, Any]) -> State:
        state = super()._state(position, reward, done, info)
        return state.replace(obs=jnp.where(jnp.abs(position) > 1.5, 0.0, position)[None])
