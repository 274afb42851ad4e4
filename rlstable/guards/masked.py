"""Reductions over valid samples. `valid=None` says that nothing can be invalid, and costs nothing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstable.device import sharding

Mask = jax.Array | None


def share(valid: Mask) -> jax.Array | None:
    """The share of valid samples over all devices, at least one sample's worth so that it can be divided by.

    Returns:
        Scalar, or None without a mask.
    """
    if valid is None:
        return None
    one = 1.0 / (valid.size * sharding.device_count())
    return jnp.maximum(sharding.mean(jnp.mean(valid.astype(jnp.float32))), one)


def some(valid: jax.Array) -> jax.Array:
    """Whether any device has a valid sample."""
    return sharding.greatest(jnp.any(valid).astype(jnp.int32)) > 0


def mean(x: jax.Array, valid: Mask, valid_share: jax.Array | None) -> jax.Array:
    """This device's part of the mean over valid samples: averaged over devices it is that mean.

    Args:
        x: `[...]`; values at invalid places do not matter, they may be NaN.
        valid: Mask of the same shape.
        valid_share: `share(valid)`, or that of a larger batch of which `x` is an equal part.
    """
    if valid is None or valid_share is None:
        return jnp.mean(x)
    return jnp.mean(jnp.where(valid, x, 0.0)) / valid_share


def mean_and_std(x: jax.Array, valid: Mask, valid_share: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation over the valid samples of all devices."""
    center = sharding.mean(mean(x, valid, valid_share))
    variance = sharding.mean(mean(jnp.square(x - center), valid, valid_share))
    return center, jnp.sqrt(variance)


def kept(tree: Any, valid: Mask) -> Any:
    """`tree` with zeros at invalid places, chosen first: a gradient sees both branches of a later choice."""
    if valid is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(_expand(valid, x), x, 0.0), tree)


def finite(tree: Any, valid: Mask) -> Any:
    """`tree` with zeros for what is not finite at invalid places; a bad number at a valid one stays, to be judged."""
    if valid is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(_expand(valid, x) | jnp.isfinite(x), x, 0.0), tree)


def least(x: jax.Array, valid: Mask) -> jax.Array:
    """The minimum over the valid samples of all devices; +inf when there is none."""
    return sharding.least(jnp.min(x if valid is None else jnp.where(_expand(valid, x), x, jnp.inf)))


def greatest(x: jax.Array, valid: Mask) -> jax.Array:
    """The maximum over the valid samples of all devices; -inf when there is none."""
    return sharding.greatest(jnp.max(x if valid is None else jnp.where(_expand(valid, x), x, -jnp.inf)))


def _expand(valid: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.reshape(valid, valid.shape + (1,) * (x.ndim - valid.ndim))
