"""Reductions over valid samples. `valid=None` means that all samples are valid, and adds no operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.device import sharding
from rlstable.device.trees import PyTree

Mask = jax.Array | None


def share(valid: Mask) -> jax.Array | None:
    """The share of valid samples over all devices, at least one sample: a division is safe. None without a mask."""
    if valid is None:
        return None
    one = 1.0 / (valid.size * sharding.device_count())
    return jnp.maximum(sharding.mean(jnp.mean(valid.astype(jnp.float32))), one)


def shares(valid: Mask, parts: jax.Array) -> jax.Array | None:
    """The share of valid samples over all devices in each of several parts, `[parts]`, may be 0; None without a mask.

    `parts` has each part's row numbers of the mask `[rows, T]`. One reduction for all parts is faster on a GPU, where
    XLA fuses the reduction of a single part with the gather of all its data.
    """
    if valid is None:
        return None
    return sharding.mean(jnp.mean(valid[parts].astype(jnp.float32), axis=(1, 2)))


def filled(valid: Mask, like: jax.Array) -> jax.Array:
    """The mask as an array; True for every element of `like` without a mask."""
    return jnp.ones(like.shape, bool) if valid is None else valid


def mean(x: jax.Array, valid: Mask, valid_share: jax.Array | None) -> jax.Array:
    """This device's part of the mean over valid samples. The average of all devices' parts is the mean.

    Invalid samples may be NaN. `valid_share` may be that of a larger batch that was split into equal parts.
    """
    if valid is None or valid_share is None:
        return jnp.mean(x)
    return jnp.mean(jnp.where(valid, x, 0.0)) / valid_share


def mean_and_std(x: jax.Array, valid: Mask, valid_share: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation over the valid samples of all devices."""
    center = sharding.mean(mean(x, valid, valid_share))
    variance = sharding.mean(mean(jnp.square(x - center), valid, valid_share))
    return center, jnp.sqrt(variance)


def zero_invalid(tree: PyTree, valid: Mask) -> PyTree:
    """`tree` with zeros for invalid samples.

    Call it before a computation: a `jnp.where` afterwards differentiates both branches.
    """
    if valid is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(_expand(valid, x), x, 0.0), tree)


def zero_invalid_nonfinite(tree: PyTree, valid: Mask) -> PyTree:
    """`tree` with zeros for non-finite numbers of invalid samples. Those of valid samples stay for a guard to find."""
    if valid is None:
        return tree
    return jax.tree.map(lambda x: jnp.where(_expand(valid, x) | jnp.isfinite(x), x, 0.0), tree)


def minimum(x: jax.Array, valid: Mask) -> jax.Array:
    """The minimum over the valid samples of all devices; +inf if no sample is valid."""
    return sharding.minimum(jnp.min(x if valid is None else jnp.where(_expand(valid, x), x, jnp.inf)))


def maximum(x: jax.Array, valid: Mask) -> jax.Array:
    """The maximum over the valid samples of all devices; -inf if no sample is valid."""
    return sharding.maximum(jnp.max(x if valid is None else jnp.where(_expand(valid, x), x, -jnp.inf)))


def _expand(valid: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.reshape(valid, valid.shape + (1,) * (x.ndim - valid.ndim))
