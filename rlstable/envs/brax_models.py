"""Builds Brax's models without a compiled program per array shape."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    """Inside, `brax.io.mjcf.load_model` does not copy the arrays of a new model.

    Brax calls `jnp.array` for each array, and JAX compiles a copy for every shape.
    """
    mjcf: Any = sys.modules.get("brax.io.mjcf")  # imported with every environment that it builds a model for
    if mjcf is None:
        yield
        return
    before = mjcf.jp
    mjcf.jp = _Numpy()
    try:
        yield
    finally:
        mjcf.jp = before


class _Numpy:
    """`jax.numpy` with an `array` that does not copy arrays of JAX."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def array(x: Any, *args: Any, **kwargs: Any) -> jax.Array:
        plain = isinstance(x, jax.Array | np.ndarray) and not args and not kwargs
        return jnp.asarray(x) if plain else jnp.array(x, *args, **kwargs)
