"""Shapes rewards: limiters, time-out bootstrap."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.transforms import apply_if
from rlstable.guards import limiters, masked, outlier
from rlstable.guards.outlier import Magnitudes
from rlstable.ppo.records import Collected

# A prize may exceed what the value network expects by this factor. It is learned in some visits, and the errors of a
# value network, which are about the size of usual rewards, hardly widen the bound.
_EXPECTED = 8.0


def value_range(reward_range: jax.Array, config: PPOConfig, limits: LimiterConfig) -> jax.Array | None:
    r"""The least and the greatest value that rewards so far can pay for ever, \(r / (1 - \gamma)\), `[2]`.

    None without the limiter or without discounting.
    """
    if limits.value_range is None or config.discounting == 1.0:
        return None
    return reward_range * limits.value_range / (1.0 - config.discounting)


def shape(
    data: Collected,
    magnitudes: Magnitudes | None,
    reward_range: jax.Array,
    config: PPOConfig,
    limits: LimiterConfig,
    expected: Callable[[], jax.Array],
) -> tuple[Collected, Magnitudes | None, jax.Array, dict[str, jax.Array]]:
    """Turns scaled rewards into the rewards that PPO learns from.

    1. Bounds the influence of rare rewards (`_bounded`), before any other number depends on them.
    2. Clips rewards to the limiter's bound.
    3. Widens `reward_range`, the least and the greatest reward so far, `[2]`, for the limiter of values.
    4. With `ppo.bootstrap_on_timeout`, adds the value estimate where the environment's time limit ended an episode, as
       in Brax.

    `magnitudes` are recent rewards, None without the limiter of rare rewards. `expected` returns the value network's
    expectation of each reward, `[rows, T]`.
    """
    metrics, share, limit = {}, masked.share(data.valid), limits.reward
    if magnitudes is not None and limits.reward_outlier is not None:
        magnitudes = outlier.observe(magnitudes, data.reward, masked.filled(data.valid, data.reward))
        bounded = _bounded(data.reward, outlier.bound(magnitudes, limits.reward_outlier), expected)
        active = (bounded != data.reward).astype(jnp.float32)
        metrics["limiters/reward_outlier/active"] = sharding.mean(masked.mean(active, data.valid, share))
        data = data._replace(reward=bounded)
    reward = data.reward
    metrics["training/reward_greatest"] = masked.maximum(jnp.abs(limiters.clip(reward, limit)), data.valid)
    if limit is not None:
        active = limiters.beyond(reward, limit)
        metrics["limiters/reward/active"] = sharding.mean(masked.mean(active, data.valid, share))
    reward = limiters.clip(reward, limit)
    if limits.value_range is not None:
        counts = masked.filled(data.valid, reward) & jnp.isfinite(reward)
        seen = jnp.where(counts, reward, 0.0)  # 0 is always in the range
        low, high = sharding.maximum(jnp.stack([-jnp.min(seen), jnp.max(seen)]))
        reward_range = jnp.stack([jnp.minimum(reward_range[0], -low), jnp.maximum(reward_range[1], high)])
    if data.time_out is not None and data.value is not None:
        value = limiters.within(data.value, value_range(reward_range, config, limits))
        # Brax scales the bootstrap with the reward.
        credit = config.discounting * config.reward_scaling * data.time_out * value
        reward += jnp.where(data.time_out > 0, credit, 0.0)
    return data._replace(reward=reward), magnitudes, reward_range, metrics


def _bounded(reward: jax.Array, bound: jax.Array, expected: Callable[[], jax.Array]) -> jax.Array:
    """Rewards clipped to `[-bound, bound]`, extended by a multiple of the reward that the value network expects.

    The value network learns where a task pays a rare prize, so a prize counts more from visit to visit, and at last in
    full. It cannot expect a glitch, which may strike anywhere.
    """

    def clip(reward: jax.Array) -> jax.Array:
        expects = expected()
        expects = _EXPECTED * jnp.where(jnp.isfinite(expects), expects, 0.0)
        clipped = jnp.clip(reward, jnp.minimum(expects, 0.0) - bound, jnp.maximum(expects, 0.0) + bound)
        return jnp.where(jnp.isfinite(reward), clipped, reward)  # clipping would turn infinity into a good reward

    return apply_if(jnp.any(jnp.abs(reward) > bound), clip, reward)
