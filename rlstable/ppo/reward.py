"""Shapes rewards: limiters, running normalisation, time-out bootstrap."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.transforms import apply_if
from rlstable.guards import limiters, masked, outlier
from rlstable.guards.outlier import Magnitudes
from rlstable.ppo import normalizer
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected

# A prize may exceed what the value network expects by this factor. It is learned in some visits, and the errors of a
# value network, which are about the size of usual rewards, hardly widen the bound.
_EXPECTED = 8.0


class RewardState(NamedTuple):
    """State of the shaping of rewards; each field is None if its option is off.

    Attributes:
        magnitudes: Recent rewards, for the limiter of outliers.
        statistics: Scalar statistics of discounted returns, for the running normalisation.
        running: Discounted return of each environment so far, `[num_envs]`.
    """

    magnitudes: Magnitudes | None
    statistics: Statistics | None
    running: jax.Array | None


def init(num_envs: int, config: PPOConfig, limits: LimiterConfig) -> RewardState:
    magnitudes = None if limits.reward_outlier is None else outlier.no_magnitudes()
    if not config.normalize_rewards:
        return RewardState(magnitudes, None, None)
    return RewardState(magnitudes, normalizer.init(jax.ShapeDtypeStruct((), jnp.float32)), jnp.zeros(num_envs))


def shape(
    data: Collected,
    state: RewardState,
    config: PPOConfig,
    limits: LimiterConfig,
    expected: Callable[[], jax.Array],
) -> tuple[Collected, RewardState, dict[str, jax.Array]]:
    """Turns scaled rewards into the rewards that PPO learns from.

    1. Bounds the influence of rare rewards (`_bounded`), before any other number depends on them.
    2. With `ppo.normalize_rewards`, divides rewards by the standard deviation of discounted returns, as in Gymnasium's
       NormalizeReward.
    3. Clips rewards to the limiter's bound.
    4. With `ppo.bootstrap_on_timeout`, adds the value estimate where the environment's time limit ended an episode, as
       in Brax.

    `expected` returns the value network's expectation of each reward, `[rows, T]`.
    """
    metrics, share, limit = {}, masked.share(data.valid), limits.reward
    if state.magnitudes is not None and limits.reward_outlier is not None:
        magnitudes = outlier.observe(state.magnitudes, data.reward, masked.filled(data.valid, data.reward))
        bounded = _bounded(data.reward, outlier.bound(magnitudes, limits.reward_outlier), expected)
        active = (bounded != data.reward).astype(jnp.float32)
        metrics["limiters/reward_outlier/active"] = sharding.mean(masked.mean(active, data.valid, share))
        data, state = data._replace(reward=bounded), state._replace(magnitudes=magnitudes)
    reward = data.reward
    if state.statistics is not None and state.running is not None:
        discounted, running = _discounted(data, state.running, config.discounting)
        settings = normalizer.of_scalars(config)
        statistics = normalizer.update(state.statistics, discounted, data.valid, settings).statistics
        state = state._replace(statistics=statistics, running=running)
        reward = reward / statistics.std
    metrics["training/reward_greatest"] = masked.maximum(jnp.abs(limiters.clip(reward, limit)), data.valid)
    if limit is not None:
        active = limiters.beyond(reward, limit)
        metrics["limiters/reward/active"] = sharding.mean(masked.mean(active, data.valid, share))
    reward = limiters.clip(reward, limit)
    if data.time_out is not None and data.value is not None:
        # Brax scales the bootstrap with the reward. Normalised rewards already have the unit of the values.
        scale = 1.0 if config.normalize_rewards else config.reward_scaling
        credit = config.discounting * scale * data.time_out * data.value
        reward += jnp.where(data.time_out > 0, credit, 0.0)
    return data._replace(reward=reward), state, metrics


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
