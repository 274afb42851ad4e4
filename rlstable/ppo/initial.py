"""The first training state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.device.counter import WideCounter
from rlstable.device.packed import PackedDict, PackedRows
from rlstable.device.precision import Precision
from rlstable.device.trees import EnvState, Observation
from rlstable.guards import outlier
from rlstable.guards.base import no_trips
from rlstable.ppo import normalizer
from rlstable.ppo.iteration import PPO
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import Counters, TrainState, Tuning


def init_tuning(settings: Settings, precision: Precision) -> Tuning:
    """The tuning before any schedule, limiter or remedy has changed it."""
    scale = precision.loss_scale
    # An array of its own for each field: the training state is donated, and no buffer may be donated twice.
    return Tuning(
        learning_rate=jnp.float32(settings.ppo.learning_rate),
        learning_rate_scale=jnp.float32(1.0),
        step_scale=jnp.float32(1.0),
        policy_rate_scale=jnp.float32(1.0),
        critic_rate_scale=jnp.float32(1.0),
        policy_hold=jnp.int32(0),
        clip_scale=jnp.float32(1.0),
        loss_scale=jnp.float32(1.0 if scale is None else scale.initial),
        good_steps=jnp.int32(0),
        reward_range=jnp.zeros(2, jnp.float32),
        total_steps=WideCounter.of(settings.total_steps) if settings.ppo.schedules_by_progress else None,
    )


def init_state(
    ppo: PPO, key: jax.Array, env_state: EnvState, reset_pool: PackedRows | None, devices: int = 1
) -> TrainState:
    """The training state before the first iteration; arguments as for `with_environments`."""
    return with_environments(init_program(ppo, env_state)(key), ppo, env_state, reset_pool, devices)


def init_program(ppo: PPO, env_state: EnvState) -> Callable[[jax.Array], TrainState]:
    """A jitted function from a random key to a training state without environments and tuning.

    Reads only the shapes of observations. Without `jax.jit` JAX would compile every operation for every shape of every
    layer.
    """
    observation = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32), ppo.networks.select(env_state.obs)
    )
    return jax.jit(functools.partial(ppo.precision.narrow()(_init_state), ppo, observation))


def with_environments(
    state: TrainState, ppo: PPO, env_state: EnvState, reset_pool: PackedRows | None, devices: int
) -> TrainState:
    """Puts environments, reset pool, incident slots and tuning into a training state.

    The tuning is data of the state and not a constant of `init_program`, so that changing it compiles nothing. The pool
    is None if no environment draws from it; `devices` share the environments.
    """
    captures = ppo.env.guards and ppo.settings.captures
    return dataclasses.replace(
        state,
        env_state=env_state,
        reset_pool=reset_pool,
        tuning=init_tuning(ppo.settings, ppo.precision),
        incident=ppo.env.empty_slot(env_state, ppo.networks.output_size, devices) if captures else None,
    )


def _init_state(ppo: PPO, observation: Observation, key: jax.Array) -> TrainState:
    key_networks, key = jax.random.split(key)
    params = ppo.networks.init(key_networks, observation)
    guards = {**ppo.env.guards, **ppo.batch_guards, **ppo.update_guards, **ppo.state_guards}
    trips = PackedDict.of({name: no_trips(guard.causes).astype(jnp.uint32) for name, guard in guards.items()})
    if guards:
        trips = dataclasses.replace(trips, whole=WideCounter(trips.whole, trips.whole))
    zero = WideCounter.zero()
    statistics = normalizer.init(observation)
    if ppo.settings.ppo.normalize_values:
        statistics = dataclasses.replace(statistics, value=normalizer.init(jax.ShapeDtypeStruct((), jnp.float32)))
    return TrainState(
        params=params,
        opt_state=ppo.optimizer.init(params),
        normalizer=statistics,
        env_state=None,
        reset_pool=None,
        guard_memory={name: guard.init().memory for name, guard in guards.items()},
        tuning=None,  # type: ignore[arg-type]  # `with_environments` adds it
        key=key,
        counters=Counters(zero, zero, zero, zero, trips),
        reward_magnitudes=None if ppo.settings.limits.reward_outlier is None else outlier.no_magnitudes(),
    )
