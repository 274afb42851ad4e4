"""Outliers: numbers far beyond what has been usual in this task, whatever its scale.

Two guards stand on this, that of rewards and that of gradient norms. What is usual is learnt from accepted numbers
alone; a number that keeps coming back is let in by and by, so that nothing is skipped for ever.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Below this many times the factor nothing is an outlier: sparse rewards, and the gradients of a task that has paid
# nothing yet, begin at zero and must be free to grow.
LEAST = 0.1
_WIDEN, _WIDEST = 1.05, 1e30


class Usual(NamedTuple):
    """The usual magnitude and its bound.

    Attributes:
        level: Scale of accepted numbers; 0 where nothing but zeros was seen, and then nothing is judged.
        allowance: Factor on the bound, 1 or more; every trip widens it by 5 %, for good.
    """

    level: jax.Array
    allowance: jax.Array


def nothing_yet() -> Usual:
    """Before the first number."""
    return Usual(jnp.zeros((), jnp.float32), jnp.ones((), jnp.float32))


def within(x: jax.Array, usual: Usual, factor: float) -> jax.Array:
    """Whether magnitudes are at most `factor` times what is usual; NaN and infinity never are.

    Args:
        x: Any shape.
        usual: What to compare with.
        factor: How far beyond the usual a number may lie.
    """
    bound = factor * jnp.maximum(usual.level, LEAST) * usual.allowance
    return jnp.isfinite(x) & ((jnp.abs(x) <= bound) | ~(usual.level > 0))


def follow(usual: Usual, level: jax.Array, tripped: jax.Array) -> Usual:
    """Updates the usual magnitude.

    Args:
        usual: Before.
        level: The new scale, of accepted numbers.
        tripped: Whether anything was refused.
    """
    wider = jnp.minimum(usual.allowance * _WIDEN, _WIDEST)
    return Usual(level, jnp.where(tripped, wider, usual.allowance))
