"""Probe tasks with a known best return, on which a trained policy collapses easily."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from brax.envs.base import Env, State
from flax import struct

TARGET = 0.5
_SECONDS = 0.2  # of one step
_KEPT = 0.5  # share of the velocity that friction leaves


@struct.dataclass
class Point:
    q: jax.Array
    qd: jax.Array


class PointMass(Env):
    """A point on a line that must stop at 0.5: a step pays 1 minus the distance, at least 0."""

    observation_size, action_size, backend = 2, 1, "none"

    def __init__(
        self,
        scale: float = 1.0,  # factor on every reward
        rare: float = 0.0,  # probability per step of a kick to a random position
        deadband: float = 0.0,  # distance within which a step pays in full
    ):
        self._scale, self._rare, self._deadband = scale, rare, deadband

    def reset(self, rng: jax.Array) -> State:
        key, own = jax.random.split(rng)
        point, zero = Point(jax.random.uniform(own, (1,), minval=-0.1, maxval=0.1), jnp.zeros(1)), jnp.zeros(())
        return State(point, self._seen(point), zero, zero, {}, {"key": key})

    def step(self, state: State, action: jax.Array) -> State:
        """Returns the state after a step of 0.2 s; the action is a force against friction."""
        key, own, where = jax.random.split(state.info["key"], 3)
        place, speed = state.pipeline_state.q[0], state.pipeline_state.qd[0]
        speed = _KEPT * speed + (1.0 - _KEPT) * jnp.clip(action[0], -1.0, 1.0)
        place = place + _SECONDS * speed
        kicked = jax.random.uniform(own) < self._rare
        place = jnp.where(kicked, jax.random.uniform(where, minval=-3.0, maxval=3.0), place)
        point = Point(place[None], speed[None])
        missed = jnp.maximum(jnp.abs(place - TARGET) - self._deadband, 0.0)
        paid = jnp.maximum(1.0 - missed, 0.0) * self._scale
        info = {**state.info, "key": key}
        return state.replace(pipeline_state=point, obs=self._seen(point), reward=paid, done=jnp.zeros(()), info=info)

    def _seen(self, point: Point) -> jax.Array:
        return jnp.concatenate([point.q, point.qd])


class Late:
    """An environment with one more element of the observation, which begins to vary late and has no meaning.

    Args:
        env: The environment.
        begins: Steps, counted over automatic resets, in which the element is 0; then it is uniform in +-0.3.
    """

    def __init__(self, env: Any, begins: int):
        self._env = env
        self._begins = begins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    @property
    def observation_size(self) -> int:
        return int(self._env.observation_size) + 1

    def reset(self, rng: jax.Array) -> Any:
        state = self._env.reset(rng)
        info = {**state.info, "late_age": jnp.zeros(()), "late_key": jax.random.fold_in(rng, 1)}
        return state.replace(obs=jnp.append(state.obs, 0.0), info=info)

    def step(self, state: Any, action: jax.Array) -> Any:
        key, own = jax.random.split(state.info["late_key"])
        age = state.info["late_age"] + 1.0
        state = self._env.step(state.replace(obs=state.obs[:-1]), action)
        element = jnp.where(age > self._begins, jax.random.uniform(own, minval=-0.3, maxval=0.3), 0.0)
        return state.replace(obs=jnp.append(state.obs, element), info={**state.info, "late_age": age, "late_key": key})


class LatePointMass(Late):
    def __init__(self, begins: int = 1000):
        super().__init__(PointMass(), begins)


@dataclasses.dataclass(frozen=True)
class Probe:
    kwargs: Mapping[str, float]  # arguments of `PointMass`
    episode_length: int  # steps
    best: float  # mean return per episode; a test computes it
    name: str = "PointMass"  # the class, of this file


REWARD_FACTORS = (0.01, 1.0, 100.0)
PROBES = {
    "point_mass": Probe({}, 50, 49.27),
    "critic_too_small": Probe({}, 100, 99.27),
    "solved_constant": Probe({"deadband": 0.1}, 50, 49.54),
    "rare_kick": Probe({"rare": 0.002}, 100, 98.0),
    "late_element": Probe({}, 50, 49.27, "LatePointMass"),
    "large_rewards": Probe({"scale": 300.0}, 50, 14_782.0),
    **{f"rewards_x{factor:g}": Probe({"scale": factor}, 50, 49.27 * factor) for factor in REWARD_FACTORS},
}
