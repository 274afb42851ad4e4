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
_ALLOWED = "an integer: Python, NumPy or JAX, or a WideCounter"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class WideCounter:
    """An unsigned 64-bit count in two 32-bit words, a pytree that works under jit, scan and vmap.

    Build a counter with `of` or `zero`: the constructor does not check its words, because JAX also calls it with
    placeholders. `+` and `-` saturate at 0 and 2^64-1. Their operand must not be negative: a negative concrete operand
    raises ValueError, a negative traced operand counts as 0. The host reads a concrete JAX operand, and so waits for
    it.

    Never sum counters over devices with `psum`, which adds the words without carry. Sum the increments first.

    Attributes:
        hi: the upper 32 bits, uint32.
        lo: the lower 32 bits, uint32.
    """

    hi: jax.Array
    lo: jax.Array

    # `==` returns an array, so counters cannot be hashed.
    __hash__: ClassVar[None] = None  # type: ignore[assignment]
    # Makes NumPy leave `np.int64(1) + counter` and comparisons to the counter.
    __array_ufunc__: ClassVar[None] = None

    @classmethod
    def zero(cls) -> WideCounter:
        """Return a count of 0."""
        return cls.of(0)

    @classmethod
    def of(cls, value: Any) -> WideCounter:
        """Return a counter that holds `value`, for example an int32 scalar of an old checkpoint.

        Args:
            value: an integer scalar (Python, NumPy or JAX, of any dtype) or a WideCounter. Above 2^64-1 it
                saturates; a negative traced value counts as 0.

        Raises:
            TypeError: `value` is not an integer; bools and floats are rejected.
            ValueError: `value` is negative, or an array of more than one count.
        """
        if isinstance(value, WideCounter):
            return value
        hi, lo = _count(value, "WideCounter.of")
        if np.shape(hi) != ():
            raise ValueError(f"WideCounter.of takes a scalar; use jax.vmap for arrays; got {_describe(value)}")
        return cls(jnp.asarray(hi), jnp.asarray(lo))

    def __int__(self) -> int:
        """Return the exact count, outside a trace."""
        if _traced(self.hi, self.lo):
            raise TypeError("int() needs a concrete WideCounter; got a traced one; use to_float() instead")
        if np.shape(self.hi) != ():
            raise TypeError(f"int() needs a scalar WideCounter; got one of shape {np.shape(self.hi)}")
        return int(self.hi) << 32 | int(self.lo)

    def __bool__(self) -> bool:
        """Return whether the count is above 0, outside a trace."""
        return int(self) > 0

    def __repr__(self) -> str:
        """Show the count if it is concrete, else the words."""
        try:
            return f"WideCounter({int(self)})"
        except (TypeError, ValueError, RuntimeError):  # traced or batched, a placeholder, a donated array
            return f"WideCounter(hi={_describe(self.hi)}, lo={_describe(self.lo)})"

    def __add__(self, x: Any) -> WideCounter:
        """Return the sum, at most 2^64-1."""
        hi, lo = self._increment(x, "+")
        low = self.lo + lo
        high = self.hi + hi
        carried = high + (low < lo).astype(jnp.uint32)
        over = (high < hi) | (carried < high)
        return WideCounter(jnp.where(over, _WORD_MAX, carried), jnp.where(over, _WORD_MAX, low))

    __radd__ = __add__

    def __sub__(self, x: Any) -> WideCounter:
        """Return the difference, at least 0."""
        hi, lo = self._increment(x, "-")
        borrow = (self.lo < lo).astype(jnp.uint32)
        under = (self.hi < hi) | ((self.hi == hi) & (self.lo < lo))
        high, low = self.hi - hi - borrow, self.lo - lo
        return WideCounter(jnp.where(under, np.uint32(0), high), jnp.where(under, np.uint32(0), low))

    def __lt__(self, x: Any) -> jax.Array:
        """Return `self < x` as a bool array; `x` may be any integer, also negative or above 2^64-1."""
        return self._order(x) < 0

    def __le__(self, x: Any) -> jax.Array:
        """Return `self <= x` as a bool array."""
        return self._order(x) <= 0

    def __gt__(self, x: Any) -> jax.Array:
        """Return `self > x` as a bool array."""
        return self._order(x) > 0

    def __ge__(self, x: Any) -> jax.Array:
        """Return `self >= x` as a bool array."""
        return self._order(x) >= 0

    def __eq__(self, x: Any) -> jax.Array:  # type: ignore[override]
        """Return `self == x` as a bool array; an object that is not a number is not equal."""
        return self._order(x) == 0 if _is_number(x) else NotImplemented

    def __ne__(self, x: Any) -> jax.Array:  # type: ignore[override]
        """Return `self != x` as a bool array."""
        return self._order(x) != 0 if _is_number(x) else NotImplemented

    def to_float(self) -> jax.Array:
        """Return the count as float32, with a relative error of at most 1e-6."""
        return _to_float(self.hi, self.lo)

    def progress(self, total: Any) -> jax.Array:
        """Return count / total as float32 in [0, 1], with a relative error of at most 1e-6.

        The result is exactly 1 if and only if the count has reached the total.

        Args:
            total: a positive integer or WideCounter. A traced total of 0 gives 1.

        Raises:
            TypeError: `total` is not an integer.
            ValueError: `total` is 0 or negative.
        """
        hi, lo = _count(total, "progress")
        if not _traced(hi, lo) and not np.all(np.asarray(hi) | np.asarray(lo)):
            raise ValueError(f"progress needs a total above 0; got {_describe(total)}")
        # A Python total may exceed the counter's range; above 2^126 the fraction would be subnormal in float32.
        whole = np.float32(min(total, 2**126)) if isinstance(total, int) else _nearest_float(hi, lo)
        # XLA divides by a constant in this way; so a traced total gives the same bits. No 1/0 for jax_debug_nans.
        part = self.to_float() * (np.float32(1) / jnp.maximum(whole, np.float32(1)))
        # Both floats are rounded, so only the exact comparison shows whether the total is reached.
        return jnp.where(self >= total, np.float32(1), jnp.minimum(part, np.float32(1)))

    def _increment(self, x: Any, operator: str) -> tuple[Any, Any]:
        """Return the words of `x` in this counter's shape, which a scan carry must keep."""
        hi, lo = _count(x, f"WideCounter {operator}")
        shape = jnp.shape(self.hi)
        try:
            return jnp.broadcast_to(hi, shape), jnp.broadcast_to(lo, shape)
        except ValueError:
            raise ValueError(f"WideCounter{list(shape)} {operator} {_describe(x)} changes its shape") from None

    def _order(self, x: Any) -> jax.Array:
        """Return -1, 0 or 1: this count is below, at or above `x`."""
        hi, lo, outside = _words(x, "comparing a WideCounter")
        higher = jnp.where(self.hi == hi, self.lo > lo, self.hi > hi)
        equal = (self.hi == hi) & (self.lo == lo)
        order = jnp.where(equal, np.int8(0), jnp.where(higher, np.int8(1), np.int8(-1)))
        return jnp.where(outside == 0, order, -outside)


def _words(x: Any, what: str) -> tuple[Any, Any, Any]:
    """Split an integer into high word, low word, and its range: -1 below 0, 1 above 2^64-1, else 0.

    A number out of range gives the words of the nearest count. A concrete value gives NumPy words: under jit every JAX
    operation returns a tracer, and without the x64 flag JAX would truncate 64 bits to 32.
    """
    if isinstance(x, WideCounter):
        return x.hi, x.lo, np.int8(0)
    if isinstance(x, int) and not isinstance(x, bool):
        inside = min(max(x, 0), LARGEST)
        return np.uint32(inside >> 32), np.uint32(inside & 0xFFFFFFFF), np.int8((x > LARGEST) - (x < 0))
    if not (isinstance(x, np.ndarray | np.generic | jax.Array) and jnp.issubdtype(x.dtype, jnp.integer)):
        raise TypeError(f"{what} takes {_ALLOWED}; got {_describe(x)}")
    y: Any = x if _traced(x) else np.asarray(x)
    if y.dtype.itemsize < 4:  # not every backend supports int2 and int4
        y = y.astype(np.int32)
    outside = -(y < 0).astype(np.int8)
    y = jnp.maximum(y, 0) if _traced(y) else np.maximum(y, 0)
    low = y.astype(np.uint32)  # keeps the lower 32 bits
    return (y >> 32).astype(np.uint32) if y.dtype.itemsize == 8 else low & np.uint32(0), low, outside


def _count(x: Any, what: str) -> tuple[Any, Any]:
    """Return the two words of `x`; reject a concrete negative value."""
    hi, lo, outside = _words(x, what)
    if not _traced(outside) and np.any(outside < 0):
        raise ValueError(f"{what} takes no negative count; got {_describe(x)}; use 0 or more")
    return hi, lo


def _to_float(hi: Any, lo: Any) -> jax.Array:
    return jnp.asarray(hi, np.float32) * np.float32(2**32) + jnp.asarray(lo, np.float32)


def _nearest_float(hi: Any, lo: Any) -> jax.Array:
    """The float32 that is nearest to a count; `_to_float` may return its neighbour, because it rounds twice."""
    hi, lo = jnp.asarray(hi), jnp.asarray(lo)
    width = np.uint32(32) - jax.lax.clz(hi)  # bits of the upper word
    top = (hi << (np.uint32(32) - width)) | jax.lax.shift_right_logical(lo, width)
    lost = jax.lax.shift_right_logical(lo, width) << width != lo
    rounded = (top | lost.astype(jnp.uint32)).astype(jnp.float32)  # one lost bit is enough to round correctly
    return jnp.where(hi == 0, lo.astype(jnp.float32), jnp.ldexp(rounded, width.astype(jnp.int32)))


def _traced(*leaves: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _is_number(x: Any) -> bool:
    return isinstance(x, WideCounter | int | float | np.ndarray | np.generic | jax.Array)


def _describe(x: Any) -> str:
    """Describe a value on one line: by type and shape if it is an array, traced or deleted."""
    traced = _traced(x)
    if traced or getattr(x, "shape", ()) != () or (isinstance(x, jax.Array) and x.is_deleted()):
        return f"{'traced ' * traced}{getattr(x, 'dtype', type(x).__name__)}{list(x.shape)}"
    if isinstance(x, int) and x.bit_length() > 128:  # Python does not print very long integers
        return f"an int of {x.bit_length()} bits"
    return f"{' '.join(repr(x).split()):.60} ({type(x).__name__})"
