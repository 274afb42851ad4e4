"""Policy distance: how far one policy is from another in what the environment sees, in nats.

The KL divergence of the raw Gaussians is a poor measure of that. A mean that moves from -11.30 to -11.11 before the
tanh, at a standard deviation of 0.001, is 18,000 nats and the same action. So the distance compares the mean and the
variance of the *squashed* action, and no difference finer than `RESOLUTION` counts. Where the policy is noisy and not
saturated, the distance is close to the KL divergence, so the usual trust-region bounds keep their meaning.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.guards import masked
from rlstable.ppo import normalizer
from rlstable.ppo.distributions import Normal
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import Transition

RESOLUTION = 0.05  # standard deviation of the noise below which two actions count as one; actions lie in [-1, 1]
_SAMPLES = 1024  # of a batch and device that the end of an iteration is measured on
_HALVINGS = 6
_NORMALIZER_LIMIT = 0.1  # nats that the normaliser alone may move a policy in an iteration; learning moves it by 0.04
_NORMALIZER_SHARE = 0.5  # of the policy's limit, where that is tighter
_GREATEST = 100.0  # nats of a single sample where nothing is bounded
_GREATEST_SHARE = 10.0  # times the limit that a single sample can contribute
# Gauss-Hermite quadrature with three nodes: exact for polynomials up to degree 5 of the noise.
_NODES = ((-(3.0**0.5), 1.0 / 6.0), (0.0, 2.0 / 3.0), (3.0**0.5, 1.0 / 6.0))


class ActionMoments(NamedTuple):
    """Mean and variance of the action that the environment receives.

    Attributes:
        mean: `[..., A]`, within [-1, 1].
        variance: `[..., A]`, `RESOLUTION` included.
    """

    mean: jax.Array
    variance: jax.Array


class Shift(NamedTuple):
    """Distance between two policies over a batch, float32 scalars in nats, the same on every device.

    Attributes:
        mean: Over the valid samples.
        p99: 99th percentile of the valid samples, 0 without any; with several devices the mean of their percentiles.
    """

    mean: jax.Array
    p99: jax.Array


def moments(distribution: Normal) -> ActionMoments:
    """Moments of the squashed action, by quadrature; an action without a tanh is clipped to [-1, 1]."""
    seen = [distribution.seen(distribution.loc + node * distribution.scale) for node, _ in _NODES]
    weighted = [weight * x for (_, weight), x in zip(_NODES, seen, strict=True)]
    mean = sum(weighted[1:], weighted[0])
    spread = [weight * jnp.square(x - mean) for (_, weight), x in zip(_NODES, seen, strict=True)]
    return ActionMoments(mean, sum(spread, jnp.full_like(mean, RESOLUTION**2)))


def distance(old: ActionMoments, new: ActionMoments) -> jax.Array:
    """KL(old || new) of Gaussians with these moments, summed over action elements, `[...]`.

    The square of the mean's shift is at most 4 and a variance at least `RESOLUTION` squared, so the distance is at most
    about 800 nats per element.
    """
    ratio = (old.variance + jnp.square(old.mean - new.mean)) / new.variance
    return 0.5 * jnp.sum(ratio - 1.0 + jnp.log(new.variance / old.variance), axis=-1)


def sampled(data: Transition) -> Transition:
    """Unrolls at equal distances, about `_SAMPLES` steps of them: enough for a mean, and a fraction of a pass."""
    rows, steps = data.log_prob.shape
    stride = max(1, rows * steps // _SAMPLES)
    return jax.tree.map(lambda x: x[:: min(stride, rows)], data)


def shift(
    networks: Networks,
    params: Params,
    statistics: Statistics,
    data: Transition,
    reference: ActionMoments,
    limit: jax.Array | float | None,
) -> Shift:
    """Distance from a reference to the policy of some parameters and statistics.

    Args:
        networks: The policy's, for observations as they were collected.
        params: Its parameters.
        statistics: Its observation statistics.
        data: Experience `[rows, T]`, for its observations and their mask.
        reference: Moments of the other policy in the same samples.
        limit: The bound of the mean; None for none.
    """
    observation = masked.finite(data.observation, data.valid)
    present = moments(networks.distribution(params, statistics, observation)[0])
    found = distance(reference, present)
    mean = masked.mean(jnp.minimum(found, most(limit)), data.valid, masked.share(data.valid))
    if data.valid is None:
        percentile = jnp.quantile(found, 0.99)
    else:
        known = jnp.nanquantile(jnp.where(data.valid, found, jnp.nan), 0.99)
        percentile = jnp.where(jnp.any(data.valid), known, 0.0)
        percentile = jnp.where(jnp.any(data.valid & jnp.isnan(found)), jnp.nan, percentile)
    return Shift(sharding.mean(mean), sharding.mean(percentile))


def most(limit: jax.Array | float | None) -> jax.Array | float:
    """The greatest distance that a single sample contributes to a mean.

    A state far off the beaten track may be hundreds of nats away while the policy as a whole has hardly moved.

    Args:
        limit: The bound of the mean, in nats; None for none.
    """
    return _GREATEST if limit is None else _GREATEST_SHARE * limit


def bounded(
    networks: Networks,
    params: Params,
    old: Statistics,
    new: Statistics,
    data: Transition,
    reference: ActionMoments,
    limit: jax.Array | float,
    config: PPOConfig,
) -> Statistics:
    """The new statistics, or a part of the way to them, so that the normaliser moves the policy little.

    Backtracking: the way is halved until the distance fits, and not taken at all after `_HALVINGS`. The first batch is
    taken in whole: before it there is nothing learnt that could be lost.

    Args:
        networks: The policy's, for observations as they were collected.
        params: Its parameters.
        old: Observation statistics before the batch.
        new: After it.
        data: Experience `[rows, T]`, for its observations and their mask.
        reference: Moments of the policy under `old` in the same samples.
        limit: Of the policy's mean distance, in nats, of which the normaliser has a part.
        config: Epsilon of the standard deviation.
    """
    first = old.count == 0
    own_limit = jnp.minimum(_NORMALIZER_SHARE * limit, _NORMALIZER_LIMIT)

    def moved(statistics: Statistics) -> jax.Array:
        return jnp.where(first, 0.0, shift(networks, params, statistics, data, reference, limit).mean)

    def shorter(carry: tuple[Statistics, jax.Array, jax.Array]) -> tuple[Statistics, jax.Array, jax.Array]:
        share = 0.5 * carry[1]
        share = jnp.where(share < 0.5**_HALVINGS, 0.0, share)
        statistics = normalizer.blend(old, new, share, config)
        return statistics, share, moved(statistics)

    def too_far(carry: tuple[Statistics, jax.Array, jax.Array]) -> jax.Array:
        return ~(carry[2] <= own_limit) & (carry[1] > 0.0)

    return jax.lax.while_loop(too_far, shorter, (new, jnp.ones(()), moved(new)))[0]
