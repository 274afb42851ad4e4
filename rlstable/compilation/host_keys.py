"""Random keys on the host: JAX's functions as three small programs, which save a second of a start."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from rlstable.compilation.xla import quick_options
from rlstable.device.trees import PyTree


def keys_of_seed(seed: int) -> tuple[jax.Array, ...]:
    """`jax.random.split(jax.random.PRNGKey(seed), 4)`; the seed is below 2**32."""
    return tuple(_quick(_keys_of_seed)(np.uint32(seed)))


def split(key: jax.Array) -> tuple[jax.Array, ...]:
    """`jax.random.split(key)`."""
    return tuple(_quick(_split)(key))


def fold_in(key: jax.Array, number: int) -> jax.Array:
    """`jax.random.fold_in(key, number)`; the number is below 2**32."""
    return _quick(jax.random.fold_in)(key, np.uint32(number))


def shape() -> jax.ShapeDtypeStruct:
    """Shape and dtype of a key, to trace programs with."""
    return jax.eval_shape(jax.random.PRNGKey, 0)


def _keys_of_seed(seed: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.random.split(jax.random.PRNGKey(seed), 4))


def _split(key: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.random.split(key))


@functools.cache
def _quick(function: Callable[..., PyTree]) -> jax.stages.Wrapped:
    return jax.jit(function, compiler_options=quick_options() or None)
