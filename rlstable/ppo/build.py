"""Putting PPO together from a configuration, and its first training state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.counter import WideCounter
from rlstable.guards.batch import batch_guards
from rlstable.guards.state import state_guards
from rlstable.guards.update import update_guards
from rlstable.ppo import normalizer
from rlstable.ppo.iteration import PPO
from rlstable.ppo.networks import Networks
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.rollout import TrainingEnv
from rlstable.ppo.state import Counters, TrainState, Tuning
from rlstable.precision import level


def make_networks(config: Config, action_size: int) -> Networks:
    """The networks of a configuration."""
    precision = level(config.precision)
    return Networks(
        config.network,
        config.guards.limiters,
        action_size,
        config.ppo.normalize_observations,
        precision.network,
    )


def make_ppo(config: Config, env: TrainingEnv, action_size: int) -> PPO:
    """Everything an iteration is made of."""
    return PPO(
        config=config,
        env=env,
        networks=make_networks(config, action_size),
        optimizer=Optimizer(config.ppo, config.guards.limiters.gradient_norm, config.total_steps),
        precision=level(config.precision),
        batch_guards=batch_guards(config.guards.transition),
        update_guards=update_guards(config.guards.update),
        state_guards=state_guards(config.guards.state),
    )


def init_state(ppo: PPO, key: jax.Array, env_state: Any, reset_pool: Any) -> TrainState:
    """The training state before the first iteration.

    Args:
        ppo: What will train.
        key: Random key.
        env_state: Environments, `[num_envs]`.
        reset_pool: Clean first states, or None.
    """
    key_networks, key = jax.random.split(key)
    observation = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], jnp.float32), ppo.networks.select(env_state.obs)
    )
    params = ppo.networks.init(key_networks, observation)
    guards = {**ppo.env.guards, **ppo.batch_guards, **ppo.update_guards, **ppo.state_guards}
    scale = ppo.precision.loss_scale
    tuning = Tuning(
        learning_rate=jnp.float32(ppo.config.ppo.learning_rate),
        learning_rate_scale=jnp.float32(1.0),
        loss_scale=jnp.float32(1.0 if scale is None else scale.initial),
        good_steps=jnp.int32(0),
        epochs=jnp.int32(ppo.config.ppo.num_updates_per_batch),
    )

    def none_of(causes: tuple[str, ...]) -> WideCounter:
        zero = jnp.zeros(len(causes), jnp.uint32)
        return WideCounter(zero, zero)

    counters = Counters(
        env_steps=WideCounter.zero(),
        iterations=WideCounter.zero(),
        updates=WideCounter.zero(),
        episodes=WideCounter.zero(),
        trips={name: none_of(guard.causes) for name, guard in guards.items()},
    )
    return TrainState(
        params=params,
        opt_state=ppo.optimizer.init(params),
        normalizer=normalizer.init(observation),
        env_state=env_state,
        reset_pool=reset_pool,
        guard_state={name: guard.init() for name, guard in guards.items()},
        tuning=tuning,
        key=key,
        counters=counters,
    )
