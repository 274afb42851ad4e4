"""Running statistics of observations, correct after 10^10 samples.

Mean and variance are stored, not the summed squares, which in float32 stop growing; the count is a WideCounter. Invalid
samples enter nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.guards import limiters
from rlstable.guards.base import select
from rlstable.guards.masked import Mask

_STD_MIN, _STD_MAX = 1e-6, 1e6  # Brax's bounds


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of an observation pytree.

    Attributes:
        count: Samples seen.
        mean: Of each element, structure and trailing shapes of one observation.
        variance: Population variance of each element.
        std: What observations are divided by.
        value: Statistics of value targets, scalars; None where values are not normalised.
    """

    count: WideCounter
    mean: Any
    variance: Any
    std: Any
    value: Statistics | None = None


def init(observation: Any) -> Statistics:
    """Statistics of nothing: mean 0, variance 0, divided by 1.

    Args:
        observation: Arrays or shapes of one observation, without batch axes.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), observation)
    return Statistics(WideCounter.zero(), zeros, zeros, jax.tree.map(jnp.ones_like, zeros))


def normalize(observation: Any, statistics: Statistics) -> Any:
    """Centers and scales observations.

    Args:
        observation: Same structure as the statistics, any leading axes.
        statistics: What to center and scale by.
    """
    return jax.tree.map(lambda x, mean, std: (x - mean) / std, observation, statistics.mean, statistics.std)


def update(
    statistics: Statistics,
    observation: Any,
    valid: Mask,
    config: PPOConfig,
    outlier: float | None = None,
    least_rate: float = 0.0,
) -> Statistics:
    """Takes in a batch, the samples of all devices together.

    Welford's update in batch form (Chan et al. 1979), or Brax's `ema` mode, whose rate is batch over total count.

    Args:
        statistics: Before.
        observation: `[rows, T, ...]` on this device.
        valid: `[rows, T]` or None.
        config: Mode, epsilon, and the count at which `ema` freezes.
        outlier: Standard deviations from the mean beyond which an element enters as if it were there; None for any
            distance, as for the first batch.
        least_rate: Least weight of the batch against all samples before it, for numbers whose scale keeps moving.
    """
    if outlier is not None:
        observation = _clip_outliers(observation, statistics, outlier)
    leaf = jax.tree.leaves(observation)[0]
    per_device = jnp.int32(leaf.shape[0] * leaf.shape[1]) if valid is None else jnp.sum(valid, dtype=jnp.int32)
    added = sharding.total(per_device)
    count = statistics.count + added
    samples, total = added.astype(jnp.float32), count.to_float()
    if valid is not None:
        # An iteration without a valid sample must not divide by zero.
        samples, total = jnp.maximum(samples, 1.0), jnp.maximum(total, 1.0)
    rate = added.astype(jnp.float32) / total
    if least_rate:
        rate = jnp.where(added > 0, jnp.maximum(rate, least_rate), rate)
    if config.normalize_until_count is not None:
        rate = jnp.where(total > float(config.normalize_until_count), 0.0, rate)

    def average(x: jax.Array) -> jax.Array:
        if valid is not None:
            x = jnp.where(jnp.reshape(valid, valid.shape + (1,) * (x.ndim - 2)), x, 0.0)
        return sharding.total(jnp.sum(x, axis=(0, 1))) / samples

    def moments(x: jax.Array, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, jax.Array]:
        if config.normalize_observations_mode == "ema":
            batch_mean = average(x)
            delta = batch_mean - mean
            new_mean = mean + rate * delta
            spread = average(jnp.square(x - batch_mean)) + delta * (batch_mean - new_mean)
        else:
            new_mean = mean + rate * average(x - mean)
            spread = average((x - mean) * (x - new_mean))
        return new_mean, variance + rate * (spread - variance)

    pairs = jax.tree.map(moments, observation, statistics.mean, statistics.variance)
    mean = jax.tree.map(lambda _, pair: pair[0], statistics.mean, pairs)
    variance = jax.tree.map(lambda _, pair: jnp.maximum(pair[1], 0.0), statistics.mean, pairs)
    std = _deviation(variance, config)
    if valid is not None:
        # Nothing has a variance of 0, and dividing by the least std would make every observation enormous.
        std = select(added > 0, std, statistics.std)
    return Statistics(count, mean, variance, std, statistics.value)


def blend(old: Statistics, new: Statistics, share: jax.Array, config: PPOConfig) -> Statistics:
    """Statistics between two others; the samples that are left out count as not seen.

    Args:
        old: Before a batch, with at least one sample.
        new: After it.
        share: How far from `old` to `new`, 0 to 1. At 0 only the deviation is recomputed, from the variance of `old`.
        config: Epsilon of the standard deviation.
    """

    def between(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(share > 0.0, a + share * (b - a), a)

    variance = jax.tree.map(between, old.variance, new.variance)
    added = (new.count.lo - old.count.lo).astype(jnp.float32)  # one batch: far below 2^32, so a wrap is harmless
    return Statistics(
        old.count + jnp.int32(share * added),
        jax.tree.map(between, old.mean, new.mean),
        variance,
        _deviation(variance, config),
        new.value,
    )


def skipped_share(old: Statistics, new: Statistics, rewards: jax.Array, valid: Mask) -> jax.Array:
    """The share of a batch's samples that the statistics did not take in.

    Args:
        old: Before the batch.
        new: After it.
        rewards: `[rows, T]` of the batch on this device, for its size.
        valid: Their mask or None.
    """
    own = jnp.int32(rewards.size) if valid is None else jnp.sum(valid, dtype=jnp.int32)
    offered = sharding.total(own).astype(jnp.float32)
    taken = (new.count.lo - old.count.lo).astype(jnp.float32)
    return 1.0 - taken / jnp.maximum(offered, 1.0)


def _deviation(variance: Any, config: PPOConfig) -> Any:
    eps = config.normalize_observations_std_eps
    return jax.tree.map(lambda v: jnp.clip(jnp.sqrt(v + eps), _STD_MIN, _STD_MAX), variance)


def outlier_share(observation: Any, statistics: Statistics, outlier: float) -> jax.Array:
    """The share of elements beyond `outlier` standard deviations, over the elements of one observation, `[...]`."""
    leaves = jax.tree.leaves(normalize(observation, statistics))
    shares = [jnp.mean(limiters.beyond(x, outlier), axis=-1) for x in leaves]
    return jnp.where(statistics.count > 0, sum(shares) / len(shares), 0.0)


def _clip_outliers(observation: Any, statistics: Statistics, outlier: float) -> Any:
    """One enormous element would pin the standard deviation for millions of samples to come."""
    seen = statistics.count > 0

    def draw_in(x: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        return jnp.where(seen, jnp.clip(x, mean - outlier * std, mean + outlier * std), x)

    return jax.tree.map(draw_in, observation, statistics.mean, statistics.std)
