"""Shapes rewards: running normalisation, bound, time-out bootstrap."""

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
    """Memory of running normalisation; both None where it is off.

    Attributes:
        statistics: Of discounted returns, scalars.
        running: The discounted return of every environment so far, `[num_envs]`.
    """

    statistics: Statistics | None
    running: jax.Array | None


def init_returns(num_envs: int, config: PPOConfig) -> Returns:
    """Before the first reward."""
    if not config.normalize_rewards:
        return Returns(None, None)
    return Returns(normalizer.init(jax.ShapeDtypeStruct((), jnp.float32)), jnp.zeros(num_envs))


def shape(
    data: Collected, returns: Returns, config: PPOConfig, limit: float | None
) -> tuple[Collected, Returns, dict[str, jax.Array]]:
    """Rewards as they are learnt from.

    With `ppo.normalize_rewards` they are divided by the standard deviation of the discounted return of the collecting
    policy, as in Gymnasium's NormalizeReward; then they are bounded, and an episode that its own time limit ended is
    credited with the value estimate (Brax's `bootstrap_on_timeout`).

    Args:
        data: `[rows, T]`, rewards scaled by `ppo.reward_scaling`.
        returns: Before.
        config: Which of it is on.
        limit: The reward limiter's.

    Returns:
        The experience, what is remembered, and metrics: the limiter's activity and the greatest reward.
    """
    reward = data.reward
    if returns.statistics is not None and returns.running is not None:
        discounted, running = _discounted(data, returns.running, config.discounting)
        statistics = normalizer.update(returns.statistics, discounted, data.valid, config)
        returns = Returns(statistics, running)
        reward = reward / statistics.std
    metrics = {"training/reward_greatest": masked.greatest(jnp.abs(limiters.clip(reward, limit)), data.valid)}
    if limit is not None:
        active = masked.mean(limiters.beyond(reward, limit), data.valid, masked.share(data.valid))
        metrics["limiters/reward/active"] = sharding.mean(active)
    reward = limiters.clip(reward, limit)
    if data.time_out is not None and data.value is not None:
        # In the unit of the values, which learn from rewards as they are here.
        scale = 1.0 if config.normalize_rewards else config.reward_scaling
        credit = config.discounting * scale * data.time_out * data.value
        reward += jnp.where(data.time_out > 0, credit, 0.0)
    return data._replace(reward=reward), returns, metrics


def _discounted(data: Collected, running: jax.Array, discount: float) -> tuple[jax.Array, jax.Array]:
    """The discounted sum of rewards up to every step of its episode, `[rows, T]`, and where each environment stands.

    Rows are unrolls of all environments one after another, so a row continues where the one `num_envs` before
    it ended. A sample that was left out pays nothing.
    """
    ended = jnp.maximum(data.termination, data.truncation)

    def by_time(x: jax.Array) -> jax.Array:
        """`[rows, T]` to `[unrolls * T, num_envs]`."""
        split = jnp.reshape(x, (-1, running.shape[0], x.shape[1]))
        return jnp.reshape(jnp.swapaxes(split, 1, 2), (-1, running.shape[0]))

    def step(carry: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, end = now
        total = discount * carry + reward
        return jnp.where(end > 0, 0.0, total), total

    running, totals = jax.lax.scan(step, running, (by_time(data.reward), by_time(ended)))
    split = jnp.reshape(totals, (-1, data.reward.shape[1], running.shape[0]))
    return jnp.reshape(jnp.swapaxes(split, 1, 2), data.reward.shape), running
