"""Outliers: numbers far larger than usual in this task, and rare. The unit of the numbers does not matter.

Rarity decides and not a count of trips: a number that becomes frequent becomes usual, and a rare number never does.

- Rewards: `Magnitudes` is a fading histogram of recent rewards, and `bound` limits what rare rewards count for.
- Gradient norms: `follow` is a running mean of logarithms, which an outlier moves by at most 5 %.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device import sharding

_EDGES = (0.0, *(2.0**power for power in range(-64, 65)))  # octaves
_KEPT = 0.98  # weight of the earlier histogram in the next one: a memory of 50 iterations
_RARE = 0.02  # largest share of numbers that is rare: one in a hundred, and again as many for chance
_MOST = 0.5  # of the numbers other than zero that are rare: sparse rewards are rare, but usual among rewards
_MEAN = 0.05  # mean that outlying numbers add, per root mean square
_LEAST_SHARE = 2.0**-12  # of outlying numbers: rarer ones, and a single one, have the bound of one in 4,096
_OUTLYING = 3  # octaves above the usual magnitude; below are the tails of ordinary distributions

_RATE = 0.05  # weight of a new norm in the running mean of logarithms
# Norms below `factor * _LEAST` are never outliers: gradients before the first reward are zero and must be able to grow.
_LEAST = 0.1


class Magnitudes(NamedTuple):
    """Fading histogram of the magnitudes of recent numbers, over all devices.

    Attributes:
        above: Numbers above each of `_EDGES`, float32 `[edges]`.
        total: All numbers, zeros included, float32.
    """

    above: jax.Array
    total: jax.Array


def no_magnitudes() -> Magnitudes:
    return Magnitudes(jnp.zeros(len(_EDGES), jnp.float32), jnp.zeros((), jnp.float32))


def observe(magnitudes: Magnitudes, x: jax.Array, alive: jax.Array) -> Magnitudes:
    """The histogram with a batch of numbers; `alive` is the mask of those that count."""
    size = jnp.where(alive & jnp.isfinite(x), jnp.abs(x), 0.0)
    # Comparisons are faster on an accelerator than a scatter, and compile faster on a CPU.
    above = jnp.sum(size[..., None] > jnp.array(_EDGES, jnp.float32), axis=tuple(range(x.ndim)), dtype=jnp.int32)
    above, total = sharding.total((above, jnp.sum(alive, dtype=jnp.int32)))
    return Magnitudes(_KEPT * magnitudes.above + above, _KEPT * magnitudes.total + total)


def bound(magnitudes: Magnitudes, factor: float) -> jax.Array:
    """The largest magnitude that a rare number may have; infinity before the first number other than zero.

    The usual magnitude is the largest one that is not rare, rounded up to a power of two. Rare are the largest 2 % of
    all numbers, but no more than half of the numbers other than zero. Numbers above 8 usual magnitudes are outlying.
    With the share p of outlying numbers the bound is `factor / sqrt(p)` usual magnitudes, or `factor / (20 p)` if it is
    smaller, but at least 8; p counts as at least 1 / 4,096. So outlying numbers add at most a root mean square of
    `factor` usual magnitudes, or 8 at a share of 2 %, however large they are.
    """
    above, total = magnitudes
    rare = jnp.minimum(_RARE * total, _MOST * above[0])
    place = jnp.sum(above > rare)  # 0 if all numbers are zero
    outlying = above[jnp.minimum(place + _OUTLYING, len(_EDGES) - 1)] / jnp.maximum(total, 1.0)
    ratio = 1.0 / jnp.maximum(outlying, _LEAST_SHARE)
    usual = jnp.array((jnp.inf, *_EDGES[1:], jnp.inf), jnp.float32)[place]
    return usual * jnp.maximum(factor * jnp.minimum(jnp.sqrt(ratio), _MEAN * ratio), 2.0**_OUTLYING)


def within(norm: jax.Array, level: jax.Array, factor: float) -> jax.Array:
    """Whether a norm is at most `factor` times the level; never true of NaN or infinity. A level of 0 is not known."""
    return jnp.isfinite(norm) & ((norm <= factor * jnp.maximum(level, _LEAST)) | ~(level > 0))


def follow(level: jax.Array, norm: jax.Array, ok: jax.Array) -> jax.Array:
    """The geometric running mean of norms. A norm of 0, or one that is not finite, does not move it.

    A norm that is not ok raises the level by at most 5 %, and usual norms take it back. If most norms become a million
    times larger, the level follows within 140 norms at a factor of 1,000.
    """
    counts = jnp.isfinite(norm) & (norm > 0)
    safe = jnp.where(counts, norm, 1.0)  # so that neither branch of `jnp.where` is NaN
    before = jnp.where(level > 0, level, safe)
    step = jnp.log(safe) - jnp.log(before)
    step = jnp.where(ok, step, jnp.minimum(step, 1.0))
    return jnp.where(counts, jnp.exp(jnp.log(before) + _RATE * step), level)
