"""Collecting experience: the policy and the environment take turns. Nothing here crosses devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.device import sharding
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, initial_states
from rlstable.ppo.networks import Networks
from rlstable.ppo.records import Collected, map_samples
from rlstable.ppo.state import Slot, TrainState


class Step(NamedTuple):
    """Result of one step of a vectorised training environment.

    Attributes:
        state: Brax-like state, batched; what is bad or over has been replaced.
        valid: bool `[B]`, or None where nothing is judged.
        guard_state: Of the env site's guards.
        incident: The first bad environment so far; None where none is caught.
    """

    state: Any
    valid: jax.Array | None
    guard_state: dict[str, GuardState]
    incident: Slot | None = None


class TrainingEnv(Protocol):
    """Interface of the environments that `collect` needs; `envs.vector` implements it."""

    @property
    def guards(self) -> Mapping[str, Guard]:
        """The env site's guards, by name."""

    def step(
        self,
        state: Any,
        action: jax.Array,
        pool: Any,
        key: jax.Array,
        guard_state: dict[str, GuardState],
        incident: Slot | None = None,
    ) -> Step:
        """One environment step for every environment of this device."""

    def empty_slot(self, state: Any, action_size: int, devices: int) -> Slot:
        """Empty slots for the first bad environment of every device."""


class Rollout(NamedTuple):
    """One iteration's experience and the environments after it.

    Attributes:
        env_state: Environments after it.
        guard_state: Env guards after it.
        data: `[rows, T]` on this device.
        metrics: float32 scalars; sums over devices are taken.
        episodes: int32, finished episodes on all devices.
        incident: The first bad environment so far; None where none is caught.
    """

    env_state: Any
    guard_state: dict[str, GuardState]
    data: Collected
    metrics: dict[str, jax.Array]
    episodes: jax.Array
    incident: Slot | None


def collect(state: TrainState, key: jax.Array, *, env: TrainingEnv, networks: Networks, config: Config) -> Rollout:
    """Runs every environment for as many unrolls as one iteration needs.

    Args:
        state: Parameters, normaliser and environments before.
        key: This device's random key.
        env: The environments.
        networks: The networks.
        config: Hyperparameters.
    """
    ppo = config.ppo
    keeps_value = ppo.bootstrap_on_timeout or ppo.clipping_epsilon_value is not None or ppo.gae == "per_iteration"

    def act_and_step(carry: Any, drawn: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        (env_state, guard_state, incident), (key, noise) = carry, drawn
        observation = networks.select(env_state.obs)
        distribution, _activity = networks.distribution(state.params, state.normalizer, observation)
        raw = distribution.sample(noise)
        value = networks.value(state.params, state.normalizer, observation) if keeps_value else None
        step = env.step(env_state, distribution.action(raw), state.reset_pool, key, guard_state, incident)
        info = step.state.info
        sample = {
            "observation": observation,
            "raw_action": raw,
            "log_prob": distribution.log_prob(raw),
            "distribution": distribution,
            "value": value,
            "reward": step.state.reward * ppo.reward_scaling,
            "truncation": info["truncation"],
            "termination": step.state.done * (1.0 - info["truncation"]),
            "valid": step.valid,
            "time_out": info["time_out"] if ppo.bootstrap_on_timeout else None,
        }
        watched = (step.state.reward, info["episode_done"], info["episode_metrics"])
        return (step.state, step.guard_state, step.incident), (sample, watched)

    def unroll(carry: Any, _: None) -> tuple[Any, Any]:
        env_state, guard_state, incident, key = carry
        key, next_key = jax.random.split(key)
        # Brax's keys, but all steps' noise at once: a step's alone takes longer than what the networks compute for it.
        keys = _chain(key, ppo.unroll_length)
        noise = jax.vmap(lambda key: jax.random.normal(key, (env_state.reward.shape[0], networks.action_size)))(keys)
        (env_state, guard_state, incident), (samples, watched) = jax.lax.scan(
            act_and_step, (env_state, guard_state, incident), (keys, noise)
        )
        data = Collected(**samples, bootstrap_observation=networks.select(env_state.obs))
        return (env_state, guard_state, incident, next_key), (data, watched)

    start = (state.env_state, initial_states(env.guards, state.guard_memory), state.incident, key)
    (env_state, guard_state, incident, _), (data, (reward, done, totals)) = jax.lax.scan(
        unroll, start, None, length=ppo.rows // ppo.num_envs
    )
    if incident is not None:
        incident = dataclasses.replace(incident, clock=jnp.zeros_like(incident.clock))
    data = map_samples(lambda x: _merge(jnp.swapaxes(x, 1, 2)), data, bootstrap=_merge)
    metrics, episodes = _episode_metrics(reward, done, totals, data.valid)
    return Rollout(env_state, guard_state, data, metrics, episodes, incident)


def _chain(key: jax.Array, length: int) -> jax.Array:
    """Keys `[length]`, each split off from what the one before left."""

    def link(key: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        own, following = jax.random.split(key)
        return following, own

    return jax.lax.scan(link, key, None, length=length)[1]


def _merge(x: jax.Array) -> jax.Array:
    """`[unrolls, envs, ...]` to `[rows, ...]`."""
    return jnp.reshape(x, (-1, *x.shape[2:]))


def _episode_metrics(
    raw_reward: jax.Array,
    episode_done: jax.Array,
    totals: dict[str, jax.Array],
    valid: masked.Mask,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Means over the episodes that finished in this iteration, NaN where none did.

    Args:
        raw_reward: Unscaled, `[unrolls, T, envs]`.
        episode_done: 1.0 where an episode ended, same shape.
        totals: The episode's sums, a dictionary of the same shape.
        valid: Mask of the samples, `[rows, T]`, or None.
    """
    finished = episode_done > 0
    if valid is not None:
        shape = (episode_done.shape[0], episode_done.shape[2], episode_done.shape[1])
        valid = jnp.swapaxes(jnp.reshape(valid, shape), 1, 2)
        finished &= valid
    share = masked.share(valid)

    def mean(x: jax.Array) -> jax.Array:
        return sharding.mean(masked.mean(x, valid, share))

    count = sharding.total(jnp.sum(finished, dtype=jnp.int32))
    metrics = {}
    for name, values in totals.items():
        metrics[f"episode/{name}"] = sharding.total(jnp.sum(jnp.where(finished, values, 0.0))) / count
    metrics["training/reward_mean"] = mean(raw_reward)
    return metrics, count
