"""Running statistics of observations, accurate after 10^10 samples.

The statistics hold mean and variance, because sums of squares stop growing in float32. The count is a WideCounter.
Invalid samples do not count.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.transforms import apply_if
from rlstable.device.trees import PyTree
from rlstable.guards import limiters
from rlstable.guards.base import select
from rlstable.guards.masked import Mask

_STD_MIN, _STD_MAX = 1e-6, 1e6  # Brax's bounds
_RARE, _MOST_SORTED = 0.02, 4096  # share of rare samples at each end of the first batch; samples to sort
_ROUNDING = 1e-6  # relative to the mean: a smaller standard deviation is float32's rounding of a constant


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of an observation pytree, each with the structure and shapes of one observation.

    Attributes:
        variance: Population variance of each element.
        std: Divisor of each element in `normalize`.
        value: Statistics of value targets, scalars; None if values are not normalised.
    """

    count: WideCounter
    mean: PyTree
    variance: PyTree
    std: PyTree
    value: Statistics | None = None


class Update(NamedTuple):
    """Statistics after a batch.

    Attributes:
        shifted: Share of the elements that took the batch's mean and variance at once; None without `shift`.
        away: Distance of the batch's mean from the mean so far, in standard deviations, of each element,
            `[elements]`; 0 in the first batch; None without `shift`.
    """

    statistics: Statistics
    shifted: jax.Array | None
    away: jax.Array | None


def init(observation: PyTree) -> Statistics:
    """Statistics without samples (mean 0, variance 0, divisor 1) from the arrays or shapes of one observation."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), observation)
    return Statistics(WideCounter.zero(), zeros, zeros, jax.tree.map(jnp.ones_like, zeros))


def normalize(observation: PyTree, statistics: Statistics) -> PyTree:
    """Subtracts the mean from observations with any leading axes, and divides by the standard deviation."""
    return jax.tree.map(lambda x, mean, std: (x - mean) / std, observation, statistics.mean, statistics.std)


def update(
    statistics: Statistics,
    observation: PyTree,
    valid: Mask,
    config: PPOConfig,
    outlier: float | None = None,
    least_rate: float = 0.0,
    shift: float | None = None,
) -> Update:
    """Updates statistics with a batch, over the samples of all devices.

    Welford's update in batch form (Chan et al. 1979), or Brax's `ema` mode, whose rate is batch over total count.

    Args:
        statistics: Statistics before the batch.
        observation: Observations of this device, `[rows, T, ...]`.
        valid: Mask of the samples, `[rows, T]`.
        config: Mode, epsilon, and the count after which statistics are frozen.
        outlier: Standard deviations from the mean to which elements are clipped; in the first batch, ranges of 96 % of
            its samples.
        least_rate: Smallest weight of the batch, for numbers whose scale changes during training.
        shift: Standard deviations; an element that is farther from its mean in the whole batch, as a root mean square,
            takes the batch's mean and variance at once. None for Brax's formulas.
    """
    if outlier is not None:
        observation = _clip_outliers(observation, statistics, outlier)
    leaf = jax.tree.leaves(observation)[0]
    per_device = jnp.int32(leaf.shape[0] * leaf.shape[1]) if valid is None else jnp.sum(valid, dtype=jnp.int32)
    added = sharding.total(per_device)
    count = statistics.count + added
    samples, total = added.astype(jnp.float32), count.to_float()
    if valid is not None:
        # Prevents a division by zero if no sample is valid.
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

    def moments(x: jax.Array, mean: jax.Array, variance: jax.Array) -> tuple[jax.Array, ...]:
        if config.normalize_observations_mode == "ema":
            batch_mean = average(x)
            delta = batch_mean - mean
            new_mean = mean + rate * delta
            spread = average(jnp.square(x - batch_mean)) + delta * (batch_mean - new_mean)
        else:
            delta = average(x - mean)
            new_mean = mean + rate * delta
            spread = average((x - mean) * (x - new_mean))
        new_variance = variance + rate * (spread - variance)
        if shift is None:
            return new_mean, jnp.maximum(new_variance, 0.0)
        batch_variance = spread - (1.0 - rate) * jnp.square(delta)
        usual = jnp.maximum(variance, jnp.square(_tolerance(mean)))
        shifted = batch_variance + jnp.square(delta) > shift**2 * usual
        # Damaged statistics stay for a guard to find.
        shifted &= (statistics.count > 0) & (rate > 0) & (variance >= 0.0)
        variance = jnp.where(shifted, batch_variance, new_variance)
        away = jnp.where(statistics.count > 0, jnp.abs(delta) / jnp.sqrt(usual), 0.0)
        mean = jnp.where(shifted, mean + delta, new_mean)
        return mean, jnp.maximum(variance, 0.0), jnp.ravel(shifted), jnp.ravel(away)

    trees = (observation, statistics.mean, statistics.variance)
    found = [moments(*leaves) for leaves in zip(*map(jax.tree.leaves, trees), strict=True)]
    means, variances, *measured = zip(*found, strict=True)
    mean, variance = (jax.tree.unflatten(jax.tree.structure(statistics.mean), x) for x in (means, variances))
    std = _std(mean, variance, config, shift)
    if valid is not None:
        # Without samples the variance is 0, and division by the smallest std would make every observation huge.
        std = select(added > 0, std, statistics.std)
    shifted, away = map(jnp.concatenate, measured) if measured else (None, None)
    share = None if shifted is None else jnp.mean(shifted.astype(jnp.float32))
    return Update(Statistics(count, mean, variance, std, statistics.value), share, away)


def constant(statistics: Statistics) -> PyTree:
    """Whether each element has never varied, apart from rounding."""
    return jax.tree.map(lambda m, v: jnp.sqrt(v) <= _tolerance(m), statistics.mean, statistics.variance)


def with_divisors(statistics: Statistics, config: PPOConfig, shift: float | None) -> Statistics:
    """The statistics with divisors computed from the variance again, in case a divisor has been damaged."""
    std = _std(statistics.mean, statistics.variance, config, shift)
    return dataclasses.replace(statistics, std=select(statistics.count > 0, std, statistics.std))


def _tolerance(mean: jax.Array) -> jax.Array:
    """The standard deviation below which an element counts as constant."""
    return jnp.maximum(_STD_MIN, _ROUNDING * jnp.abs(mean))


def _std(mean: PyTree, variance: PyTree, config: PPOConfig, shift: float | None) -> PyTree:
    """The divisors; with `shift` a constant is divided by its size, at least 1, so that a later change is small."""
    eps = config.normalize_observations_std_eps

    def divisor(m: jax.Array, v: jax.Array) -> jax.Array:
        # Brax bounds the divisors of observations from above too; value targets may have any unit.
        std = jnp.clip(jnp.sqrt(v + eps), _STD_MIN, _STD_MAX if shift is None and m.ndim else None)
        if shift is None:
            return std
        return jnp.where(jnp.sqrt(v) <= _tolerance(m), jnp.maximum(jnp.abs(m), 1.0), std)

    return jax.tree.map(divisor, mean, variance)


def of_scalars(config: PPOConfig) -> PPOConfig:
    """The settings for statistics of value targets, without those that concern observations only."""
    return config.model_copy(update={"normalize_until_count": None, "normalize_observations_std_eps": 0.0})


def outlier_share(observation: PyTree, statistics: Statistics, outlier: float) -> jax.Array:
    """Share of an observation's elements beyond `outlier` standard deviations, `[...]`."""
    leaves = jax.tree.leaves(normalize(observation, statistics))
    shares = [jnp.mean(limiters.beyond(x, outlier), axis=-1) for x in leaves]
    return jnp.where(statistics.count > 0, sum(shares) / len(shares), 0.0)


def _clip_outliers(observation: PyTree, statistics: Statistics, outlier: float) -> PyTree:
    """Clips observations: one huge element would dominate the standard deviation for millions of samples."""
    low = jax.tree.map(lambda mean, std: mean - outlier * std, statistics.mean, statistics.std)
    high = jax.tree.map(lambda mean, std: mean + outlier * std, statistics.mean, statistics.std)

    def of_first_batch(_: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(observation)
        bounds = [_bounds_of_first_batch(x, outlier) for x in leaves]
        return tuple(jax.tree.unflatten(structure, side) for side in zip(*bounds, strict=True))

    low, high = apply_if(statistics.count == 0, of_first_batch, (low, high))
    return jax.tree.map(jnp.clip, observation, low, high)


def _bounds_of_first_batch(x: jax.Array, outlier: float) -> tuple[jax.Array, jax.Array]:
    """Bounds of each element of the first batch, from the range of 96 % of its samples; infinite without a range.

    An element without a range is a constant, or a rare event whose size is not known.
    """
    samples = x.reshape(-1, *x.shape[2:])
    samples = jnp.sort(samples[:: max(1, samples.shape[0] // _MOST_SORTED)], axis=0)
    least, greatest = samples[int(_RARE * len(samples))], samples[-1 - int(_RARE * len(samples))]
    least, greatest = sharding.minimum(least), sharding.maximum(greatest)
    reach = jnp.where(greatest > least, outlier * (greatest - least), jnp.inf)
    return least - reach, greatest + reach
