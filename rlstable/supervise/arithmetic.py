"""Precision that a matrix product delivers on this device, measured against float64: the flag may lie.

An error is given relative to `|A| |B|`, the same product without signs, so that it measures the arithmetic and not
sums that happen to cancel. It is then expressed in bits: those of a significand to which rounding both factors, and
doing nothing else wrong, gives the same error. Significands, the implicit bit included, have 24 bits in float32, 11 in
TF32 (and float16) and 8 in bfloat16 (IEEE 754; NVIDIA's Ampere white paper); three bfloat16 products, as TPUs do it for
`high`, keep about 16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.precision import Precision

# Rows, common dimension, columns: a square product, and what a hidden layer does with a batch. Multiples of 64, which
# tensor cores take without padding; small enough that the check itself costs nothing.
SHAPES = ((256, 256, 256), (2048, 64, 256))

# Least bits of each kind: half-way between the significands named above. Adding up in float32 costs it two to three.
_KINDS = ((20.0, "float32"), (13.5, "bfloat16 x3"), (9.5, "tf32"), (0.0, "bfloat16"))
# Two levels differ by at least a quarter of a bit; the same arithmetic in another order of summation differs by less.
_SAME_BITS = 0.25
# What each name promises at least (docs of `jax.lax.Precision`); `default` is the device's own choice.
_PROMISED_BITS = {"high": 9.5, "tensorfloat32": 9.5, "highest": 20.0, "float32": 20.0}
_TF32_BITS = 11


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How exact one matrix product is, the worst over all shapes that were tried.

    Attributes:
        max_error: Largest error of an element relative to `|A| |B|`.
        rms_error: Root mean square of the same.
        bits: Bits of the significand to which rounding the factors would do as much; inf where there is no error, 0
            where a result is not finite.
    """

    max_error: float
    rms_error: float
    bits: float

    @property
    def kind(self) -> str:
        """The arithmetic that this is the accuracy of: float32, bfloat16 x3, tf32 or bfloat16."""
        return next(name for least, name in _KINDS if self.bits >= least)


def measure(levels: Sequence[str] = ("default", "high", "highest")) -> dict[str, Accuracy]:
    """Multiplies the same matrices at every level, traced as training is, and compares with float64.

    Args:
        levels: Names that `jax.default_matmul_precision` takes.

    Returns:
        The accuracy by level, in the order given. The same on every call.
    """
    return {level: _worst([_accuracy(_multiply(x, y, level), x, y) for x, y in _factors()]) for level in levels}


def distinct_levels(measured: Mapping[str, Accuracy]) -> tuple[str, ...]:
    """The levels worth having on this device, from the first on: each more exact than every one before it.

    Args:
        measured: From the cheapest level to the most exact one, as `measure` returns it.
    """
    kept: list[str] = []
    best = -math.inf
    for level, accuracy in measured.items():
        if not kept or accuracy.bits > best + _SAME_BITS:
            kept.append(level)
            best = accuracy.bits
    return tuple(kept)


def undelivered(measured: Mapping[str, Accuracy]) -> dict[str, str]:
    """The levels that are less exact than their name promises, each with the arithmetic that was measured instead."""
    return {
        level: accuracy.kind for level, accuracy in measured.items() if accuracy.bits < _PROMISED_BITS.get(level, 0.0)
    }


def measure_x64() -> float:
    """The largest error of a float64 product under `jax.enable_x64()`, relative to `|A| |B|`: 0 where float64 works.

    The factors are whole numbers, small enough that every partial sum has at most 53 bits: float64 makes no error in
    any order of summation, float32 makes one of about 1e-8. Infinite if the device refuses.
    """
    random = np.random.default_rng(0)
    x, y = (random.integers(-(2**22), 2**22, (64, 64)) for _ in range(2))
    exact = x @ y
    try:
        with jax.enable_x64(True):
            product = np.asarray(jax.jit(jnp.matmul)(x.astype(np.float64), y.astype(np.float64)))
    except (jax.errors.JaxRuntimeError, NotImplementedError, TypeError):
        return math.inf
    if not np.isfinite(product).all():
        return math.inf
    # Both sides are whole numbers below 2**52, which float64 holds exactly.
    return float(np.max(np.abs(product - exact) / (np.abs(x) @ np.abs(y))))


def _factors() -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(0)
    return [
        (random.standard_normal((rows, inner), np.float32), random.standard_normal((inner, columns), np.float32))
        for rows, inner, columns in SHAPES
    ]


def _multiply(x: np.ndarray, y: np.ndarray, level: str) -> np.ndarray:
    with Precision(level, jnp.dtype(jnp.float32), None).traced():
        return np.asarray(jax.jit(jnp.matmul)(x, y))


def _accuracy(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> Accuracy:
    worst, rms = _errors(product, x, y)
    _, of_tf32 = _errors(_rounded(x, _TF32_BITS) @ _rounded(y, _TF32_BITS), x, y)
    if not math.isfinite(rms):
        return Accuracy(math.inf, math.inf, 0.0)
    return Accuracy(worst, rms, max(0.0, _TF32_BITS - math.log2(rms / of_tf32)) if rms else math.inf)


def _errors(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    error = np.abs(product - wide_x @ wide_y) / (np.abs(wide_x) @ np.abs(wide_y))
    return float(np.max(error)), float(np.sqrt(np.mean(np.square(error))))


def _rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Float64 with a significand of so many bits, to nearest."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)


def _worst(accuracies: Sequence[Accuracy]) -> Accuracy:
    return Accuracy(
        max(a.max_error for a in accuracies), max(a.rms_error for a in accuracies), min(a.bits for a in accuracies)
    )
