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

from rlstable.ppo.distributions import Normal

RESOLUTION = 0.05  # standard deviation of the noise below which two actions count as one; actions lie in [-1, 1]
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


def moments(distribution: Normal) -> ActionMoments:
    """Moments of the squashed action, by quadrature; an action without a tanh is clipped to [-1, 1]."""
    seen = [distribution.applied_action(distribution.loc + node * distribution.scale) for node, _ in _NODES]
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


def sample_cap(limit: jax.Array | float | None) -> jax.Array | float:
    """The greatest distance that a single sample contributes to a mean.

    A state far off the beaten track may be hundreds of nats away while the policy as a whole has hardly moved.

    Args:
        limit: The bound of the mean, in nats; None for none.
    """
    return _GREATEST if limit is None else _GREATEST_SHARE * limit
