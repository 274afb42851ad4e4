"""Outliers: numbers far larger than the usual magnitude in this task.

The guards of rewards and of gradient norms use this module. Only accepted numbers change the usual magnitude. Every
trip raises the bound a little, so that a number that keeps coming is accepted in the end.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Numbers below `factor * LEAST` are never outliers: sparse rewards, and gradients before the first reward, start at
# zero and must be able to grow.
LEAST = 0.1
_WIDEN, _WIDEST = 1.05, 1e30


class UsualMagnitude(NamedTuple):
    """The usual magnitude and its bound.

    Attributes:
        level: Magnitude of accepted numbers. While it is 0, every finite number is accepted.
        allowance: Factor on the bound, at least 1; every trip raises it by 5 %, permanently.
    """

    level: jax.Array
    allowance: jax.Array


def initial() -> UsualMagnitude:
    """The initial value: no number so far."""
    return UsualMagnitude(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))


def within(x: jax.Array, usual: UsualMagnitude, factor: float) -> jax.Array:
    """Whether magnitudes are at most `factor` times the usual magnitude; never true of NaN or infinity."""
    bound = factor * jnp.maximum(usual.level, LEAST) * usual.allowance
    return jnp.isfinite(x) & ((jnp.abs(x) <= bound) | ~(usual.level > 0))


def update(usual: UsualMagnitude, level: jax.Array, tripped: jax.Array) -> UsualMagnitude:
    """The usual magnitude with a new level of accepted numbers; a trip raises the allowance."""
    wider = jnp.minimum(usual.allowance * _WIDEN, _WIDEST)
    return UsualMagnitude(level, jnp.where(tripped, wider, usual.allowance))
