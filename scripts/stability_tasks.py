"""Probe tasks with a known best return, on which a policy that was learnt is easily lost again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from brax.envs.base import Env, State
from flax import struct


@struct.dataclass
class Point:
    """Place and speed of the point, each `[1]`, under the names that physics has in Brax."""

    q: jax.Array
    qd: jax.Array


class PointMass(Env):
    """A point on a line that is to stand still at 0.5: a step pays 1 minus the distance, at least 0.

    Args:
        scale: Factor on every reward.
        rare: Probability per step of a kick that throws the point far away.
        drop_at: Steps, counted over automatic resets, after which a step pays half; 0 for never.
        deadband: Distance within which a step pays in full.
    """

    def __init__(self, scale: float = 1.0, rare: float = 0.0, drop_at: int = 0, deadband: float = 0.0):
        self._scale = scale
        self._rare = rare
        self._drop_at = drop_at
        self._deadband = deadband

    def reset(self, rng: jax.Array) -> State:
        """A first state: at rest, within 0.1 of 0."""
        key, own = jax.random.split(rng)
        point = Point(jax.random.uniform(own, (1,), minval=-0.1, maxval=0.1), jnp.zeros(1))
        zero = jnp.zeros(())
        return State(point, self._seen(point), zero, zero, {}, {"key": key, "age": zero})

    def step(self, state: State, action: jax.Array) -> State:
        """One step of 0.2 s; the action is a force that friction answers."""
        key, own, where = jax.random.split(state.info["key"], 3)
        place, speed = state.pipeline_state.q[0], state.pipeline_state.qd[0]
        speed = 0.5 * speed + 0.5 * jnp.clip(action[0], -1.0, 1.0)
        place = place + 0.2 * speed
        kicked = jax.random.uniform(own) < self._rare
        place = jnp.where(kicked, jax.random.uniform(where, minval=-3.0, maxval=3.0), place)
        point = Point(place[None], speed[None])
        missed = jnp.maximum(jnp.abs(place - 0.5) - self._deadband, 0.0)
        age = state.info["age"] + 1.0
        paid = jnp.maximum(1.0 - missed, 0.0) * self._scale
        if self._drop_at:
            paid = jnp.where(age > self._drop_at, 0.5 * paid, paid)
        info = {**state.info, "key": key, "age": age}
        zero = jnp.zeros(())
        return state.replace(pipeline_state=point, obs=self._seen(point), reward=paid, done=zero, info=info)

    def _seen(self, point: Point) -> jax.Array:
        return jnp.concatenate([point.q, point.qd])

    @property
    def observation_size(self) -> int:
        return 2

    @property
    def action_size(self) -> int:
        return 1

    @property
    def backend(self) -> str:
        return "none"

    @property
    def unwrapped(self) -> Any:
        return self
