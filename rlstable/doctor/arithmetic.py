"""Measures the precision of matrix products on this device against float64, since a precision flag may have no effect.

An error is relative to `|A| |B|`, the product of absolute values, so that sums that cancel do not enlarge it. The error
is expressed in bits of a significand: rounding both factors to so many bits gives the same error.

| type | bits of the significand, with the implicit bit |
|---|---|
| float32 | 24 |
| three bfloat16 products (`high` on TPUs) | about 16 |
| TF32, float16 | 11 |
| bfloat16 | 8 |

Sources: IEEE 754; NVIDIA's Ampere white paper.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.precision import Precision

# Rows, inner dimension, columns: a square product, and the product of a hidden layer with a batch. Multiples of 64 need
# no padding on tensor cores, and the small sizes keep the check fast.
SHAPES = ((256, 256, 256), (2048, 64, 256))

# Fewest bits of each kind: half-way between the significands above. Summation in float32 loses two to three bits.
_KINDS = ((20.0, "float32"), (13.5, "bfloat16 x3"), (9.5, "tf32"), (0.0, "bfloat16"))
# Fewest bits that each name promises (docs of `jax.lax.Precision`); `default` promises nothing.
_PROMISED_BITS = {"high": 9.5, "tensorfloat32": 9.5, "highest": 20.0, "float32": 20.0}
_TF32_BITS = 11


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Accuracy of a matrix product, the worst over several shapes."""

    max_error: float  # largest error of an element relative to |A| |B|
    rms_error: float  # root mean square error relative to |A| |B|
    bits: float  # of a significand with the same error; inf without an error, 0 if a result is not finite

    @property
    def kind(self) -> str:
        """The arithmetic with this accuracy: float32, bfloat16 x3, tf32 or bfloat16."""
        return next(name for least, name in _KINDS if self.bits >= least)


def measure(levels: Sequence[str] = ("default", "high", "highest")) -> dict[str, Accuracy]:
    """Multiplies the same matrices at every level of JAX, traced like training, and compares with float64."""
    found = {level: [_accuracy(_multiply(x, y, level), x, y) for x, y in _factors()] for level in levels}
    return {
        level: Accuracy(max(a.max_error for a in all_), max(a.rms_error for a in all_), min(a.bits for a in all_))
        for level, all_ in found.items()
    }


def undelivered(measured: Mapping[str, Accuracy]) -> dict[str, str]:
    """The levels that are less accurate than their name promises, each with the measured arithmetic."""
    return {
        level: accuracy.kind for level, accuracy in measured.items() if accuracy.bits < _PROMISED_BITS.get(level, 0.0)
    }


def measure_x64() -> float:
    """The largest error of a float64 product under `jax.enable_x64()`, relative to `|A| |B|`; 0 if float64 works.

    The factors are whole numbers, and every partial sum has at most 53 bits. Float64 then has no error in any order of
    summation, and float32 has an error of about 1e-8. The result is infinite if the device rejects float64.
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
    draw = np.random.default_rng(0).standard_normal
    return [(draw((rows, inner), np.float32), draw((inner, columns), np.float32)) for rows, inner, columns in SHAPES]


def _multiply(x: np.ndarray, y: np.ndarray, level: str) -> np.ndarray:
    with Precision(level, jnp.dtype(jnp.float32), None).traced():
        return np.asarray(jax.jit(jnp.matmul)(x, y))


def _accuracy(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> Accuracy:
    worst, rms = _errors(product, x, y)
    _, tf32_rms = _errors(_rounded(x, _TF32_BITS) @ _rounded(y, _TF32_BITS), x, y)
    if not math.isfinite(rms):
        return Accuracy(math.inf, math.inf, 0.0)
    return Accuracy(worst, rms, max(0.0, _TF32_BITS - math.log2(rms / tf32_rms)) if rms else math.inf)


def _errors(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    error = np.abs(product - wide_x @ wide_y) / (np.abs(wide_x) @ np.abs(wide_y))
    return float(np.max(error)), float(np.sqrt(np.mean(np.square(error))))


def _rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Rounds to the nearest float64 with a significand of `bits` bits."""
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits)
