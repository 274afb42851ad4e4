"""Shapes rewards: running normalisation, limiter, time-out bootstrap."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.guards import limiters, masked
from rlstable.ppo import normalizer
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected


class Returns(NamedTuple):
    """State of the running normalisation: scalar statistics, and the discounted return so far, `[num_envs]`.

    Both fields are None if it is off.
    """

    statistics: Statistics | None
    running: jax.Array | None


def init_returns(num_envs: int, config: PPOConfig) -> Returns:
    if not config.normalize_rewards:
        return Returns(None, None)
    return Returns(normalizer.init(jax.ShapeDtypeStruct((), jnp.float32)), jnp.zeros(num_envs))


def shape(
    data: Collected, returns: Returns, config: PPOConfig, limit: float | None
) -> tuple[Collected, Returns, dict[str, jax.Array]]:
    """Turns scaled rewards into the rewards that PPO learns from.

    1. With `ppo.normalize_rewards`, divides rewards by the standard deviation of discounted returns, as in Gymnasium's
       NormalizeReward.
    2. Clips rewards to the limiter's bound.
    3. With `ppo.bootstrap_on_timeout`, adds the value estimate where the environment's time limit ended an episode, as
       in Brax.

    `limit` is the largest absolute reward; None for no limiter.
    """
    reward = data.reward
    if returns.statistics is not None and returns.running is not None:
        discounted, running = _discounted(data, returns.running, config.discounting)
        settings = normalizer.of_scalars(config)
        statistics = normalizer.update(returns.statistics, discounted, data.valid, settings).statistics
        returns = Returns(statistics, running)
        reward = reward / statistics.std
    metrics = {"training/reward_greatest": masked.maximum(jnp.abs(limiters.clip(reward, limit)), data.valid)}
    if limit is not None:
        active = masked.mean(limiters.beyond(reward, limit), data.valid, masked.share(data.valid))
        metrics["limiters/reward/active"] = sharding.mean(active)
    reward = limiters.clip(reward, limit)
    if data.time_out is not None and data.value is not None:
        # Brax scales the bootstrap with the reward. Normalised rewards already have the unit of the values.
        scale = 1.0 if config.normalize_rewards else config.reward_scaling
        credit = config.discounting * scale * data.time_out * data.value
        reward += jnp.where(data.time_out > 0, credit, 0.0)
    return data._replace(reward=reward), returns, metrics


def _discounted(data: Collected, running: jax.Array, discount: float) -> tuple[jax.Array, jax.Array]:
    """The discounted return of each episode up to every step, `[rows, T]`, and up to the last step, `[num_envs]`.

    Rows hold the unrolls of all environments, one unroll after another. So row `i` continues row `i - num_envs`.
    Invalid samples have reward 0.
    """
    ended = jnp.maximum(data.termination, data.truncation)

    steps, envs = data.reward.shape[1], running.shape[0]

    def by_time(x: jax.Array) -> jax.Array:
        """`[rows, T]` to `[unrolls * T, num_envs]`."""
        return jnp.swapaxes(x.reshape(-1, envs, steps), 1, 2).reshape(-1, envs)

    def step(carry: jax.Array, sample: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, end = sample
        total = discount * carry + reward
        return jnp.where(end > 0, 0.0, total), total

    running, totals = jax.lax.scan(step, running, (by_time(data.reward), by_time(ended)))
    return jnp.swapaxes(totals.reshape(-1, steps, envs), 1, 2).reshape(data.reward.shape), running
