"""WideCounter: a 64-bit step counter that does not overflow and does not need the x64 flag.

An int32 count of environment steps becomes negative at 2^31, which large runs reach. A WideCounter has two uint32 words
and saturates at 2^64-1.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 2**64 - 1
_WORD_MAX = np.uint32(2**32 - 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WideCounter:
    """An unsigned 64-bit count in two 32-bit words, a pytree that works under jit, scan and vmap.

    Operands are counters, Python integers, or arrays of at most 32 bits, of which negative elements count as 0. Never
    sum counters over devices with `psum`, which adds the words without carry. Sum the increments first.
    """

    hi: jax.Array  # the upper 32 bits, uint32
    lo: jax.Array  # the lower 32 bits, uint32

    # `==` returns an array, so counters cannot be hashed.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]
    # Makes NumPy leave `np.int64(1) + counter` and comparisons to the counter.
    __array_ufunc__: ClassVar[None] = None

    @classmethod
    def zero(cls) -> WideCounter:
        return cls.of(0)

    @classmethod
    def of(cls, value: object) -> WideCounter:
        """A counter that holds an integer; a TypeError for other types, a ValueError for a negative Python integer."""
        hi, lo = _words(value)
        return cls(jnp.asarray(hi), jnp.asarray(lo))

    def __int__(self) -> int:
        return int(self.hi) << 32 | int(self.lo)

    def __bool__(self) -> bool:
        return int(self) > 0

    def __add__(self, x: object) -> WideCounter:
        hi, lo = (jnp.broadcast_to(word, jnp.shape(self.hi)) for word in _words(x))  # a scan carry keeps its shape
        low = self.lo + lo
        high = self.hi + hi
        carried = high + (low < lo).astype(jnp.uint32)
        over = (high < hi) | (carried < high)
        return WideCounter(jnp.where(over, _WORD_MAX, carried), jnp.where(over, _WORD_MAX, low))

    __radd__ = __add__

    def __eq__(self, x: object) -> jax.Array:  # type: ignore[override]
        return self._order(x) == 0

    def __ne__(self, x: object) -> jax.Array:  # type: ignore[override]
        return self._order(x) != 0

    def __lt__(self, x: object) -> jax.Array:
        return self._order(x) < 0

    def __le__(self, x: object) -> jax.Array:
        return self._order(x) <= 0

    def __gt__(self, x: object) -> jax.Array:
        return self._order(x) > 0

    def __ge__(self, x: object) -> jax.Array:
        return self._order(x) >= 0

    def _order(self, x: Any) -> jax.Array:
        """-1, 0 or 1: this count is below, at or above `x`. XLA rounds other numbers differently if this changes."""
        hi, lo = _words(x)
        below_zero = np.int8(0) if isinstance(x, WideCounter | int | np.integer) else -(x < 0).astype(np.int8)
        higher = jnp.where(self.hi == hi, self.lo > lo, self.hi > hi)
        equal = (self.hi == hi) & (self.lo == lo)
        order = jnp.where(equal, np.int8(0), jnp.where(higher, np.int8(1), np.int8(-1)))
        return jnp.where(below_zero == 0, order, -below_zero)

    def to_float(self) -> jax.Array:
        """The count as float32, with a relative error of at most 1e-6."""
        return jnp.asarray(self.hi, np.float32) * np.float32(2**32) + jnp.asarray(self.lo, np.float32)

    def progress(self, total: WideCounter) -> jax.Array:
        """Count / total as float32 in [0, 1], with a relative error of at most 1e-6.

        The result is exactly 1 if and only if the count has reached the total.
        """
        # XLA divides by a constant in this way; so a traced total gives the same bits. No 1/0 for jax_debug_nans.
        part = self.to_float() * (np.float32(1) / jnp.maximum(_nearest_float(total), np.float32(1)))
        # Both floats are rounded, so only the exact comparison shows whether the total is reached.
        return jnp.where(self >= total, np.float32(1), jnp.minimum(part, np.float32(1)))


def _words(x: Any) -> tuple[Any, Any]:
    """The high and the low word of an integer; constants stay NumPy arrays under jit."""
    if isinstance(x, WideCounter):
        return x.hi, x.lo
    if isinstance(x, int | np.integer) and not isinstance(x, bool):
        if x < 0:
            raise ValueError(f"a WideCounter takes no negative count; got {x}")
        count = min(int(x), LARGEST)
        return np.uint32(count >> 32), np.uint32(count & 0xFFFFFFFF)
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize > 4:
        raise TypeError(f"a WideCounter takes integers, as arrays of at most 32 bits; got {dtype or type(x).__name__}")
    low = jnp.maximum(x, 0).astype(jnp.uint32)
    return low & np.uint32(0), low


def _nearest_float(count: WideCounter) -> jax.Array:
    """The float32 that is nearest to a count; `to_float` may return its neighbour, because it rounds twice."""
    hi, lo = jnp.asarray(count.hi), jnp.asarray(count.lo)
    width = np.uint32(32) - jax.lax.clz(hi)  # bits of the upper word
    top = (hi << (np.uint32(32) - width)) | jax.lax.shift_right_logical(lo, width)
    lost = jax.lax.shift_right_logical(lo, width) << width != lo
    rounded = (top | lost.astype(jnp.uint32)).astype(jnp.float32)  # one lost bit is enough to round correctly
    return jnp.where(hi == 0, lo.astype(jnp.float32), jnp.ldexp(rounded, width.astype(jnp.int32)))
