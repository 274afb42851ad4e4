"""Policy distance: nats per action element between the actions that two policies apply to the environment.

The KL divergence of the raw Gaussians measures this distance badly. Example: before the tanh a mean moves from -11.30
to -11.11, at a standard deviation of 0.001. The KL is 18,000 nats, and the action is the same. So the distance compares
mean and variance of the *squashed* action, and ignores differences finer than `RESOLUTION`. If the policy is noisy and
not saturated, the distance is close to the KL divergence over the number of action elements.

The distance is a mean over action elements, because policies with twelve elements that each move by 0.1 nats are as
healthy as a policy with one: with a sum, the KL limiter cost such policies 8 % of their return.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.ppo.distributions import Normal

RESOLUTION = 0.05  # smallest standard deviation of an action in [-1, 1]; smaller differences of actions do not count
_CAP_WITHOUT_LIMIT = 100.0  # largest contribution of one sample
_CAP_PER_LIMIT = 10.0  # largest contribution of one sample, as a multiple of the limit
# Gauss-Hermite quadrature with three nodes: exact for polynomials of the noise up to degree 5.
_NODES = ((-(3.0**0.5), 1.0 / 6.0), (0.0, 2.0 / 3.0), (3.0**0.5, 1.0 / 6.0))


class ActionMoments(NamedTuple):
    """Mean and variance of the action that the environment receives.

    Attributes:
        mean: Mean, `[..., A]`, within [-1, 1].
        variance: Variance plus `RESOLUTION` squared, `[..., A]`.
    """

    mean: jax.Array
    variance: jax.Array


def moments(distribution: Normal) -> ActionMoments:
    """Moments of the squashed action, by quadrature; actions without a tanh are clipped to [-1, 1]."""
    actions = [distribution.applied_action(distribution.loc + node * distribution.scale) for node, _ in _NODES]
    weighted = [weight * x for (_, weight), x in zip(_NODES, actions, strict=True)]
    mean = sum(weighted[1:], weighted[0])
    spread = [weight * jnp.square(x - mean) for (_, weight), x in zip(_NODES, actions, strict=True)]
    return ActionMoments(mean, sum(spread, jnp.full_like(mean, RESOLUTION**2)))


def distance(old: ActionMoments, new: ActionMoments) -> jax.Array:
    """KL(old || new) of Gaussians with these moments, the mean over action elements, `[...]`.

    The mean moves by at most 2 and a variance is at least `RESOLUTION` squared. So the distance is at most about 800.
    """
    ratio = (old.variance + jnp.square(old.mean - new.mean)) / new.variance
    return 0.5 * jnp.mean(ratio - 1.0 + jnp.log(new.variance / old.variance), axis=-1)


def sample_cap(limit: jax.Array | float | None) -> jax.Array | float:
    """Largest distance that one sample contributes to a mean.

    A rare state may be hundreds of nats away while the policy as a whole has hardly moved. `limit` is the largest mean
    distance in nats.
    """
    return _CAP_WITHOUT_LIMIT if limit is None else _CAP_PER_LIMIT * limit
