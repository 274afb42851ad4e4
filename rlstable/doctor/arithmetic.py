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
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.precision import Precision

# Rows, inner dimension and columns of a hidden layer with a batch. Multiples of 64 need no padding on tensor cores.
_ROWS, _INNER, _COLUMNS = 2048, 64, 256
_TF32_BITS, _TF32_ERROR = 11, 5.69e-5  # bits, and root mean square error of this product with factors of so many bits
# Fewest bits of each kind: half-way between the significands above. Summation in float32 loses two to three bits.
_KINDS = ((20.0, "float32"), (13.5, "bfloat16 x3"), (9.5, "tf32"), (0.0, "bfloat16"))
# Fewest bits that each name promises (docs of `jax.lax.Precision`); `default` promises nothing.
_PROMISED_BITS = {"default": 0.0, "high": 9.5, "highest": 20.0}


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """Accuracy of a matrix product."""

    max_error: float  # largest error of an element relative to |A| |B|
    rms_error: float  # root mean square error relative to |A| |B|
    bits: float  # of a significand with the same error; inf without an error, 0 if a result is not finite

    @property
    def kind(self) -> str:
        """The arithmetic with this accuracy: float32, bfloat16 x3, tf32 or bfloat16."""
        return next(name for least, name in _KINDS if self.bits >= least)


def measure() -> dict[str, Accuracy]:
    """Multiplies the same matrices at every level of JAX, traced like training, and compares with float64."""
    draw = np.random.default_rng(0).standard_normal
    x, y = draw((_ROWS, _INNER), np.float32), draw((_INNER, _COLUMNS), np.float32)
    return {level: accuracy(_multiply(x, y, level), x, y) for level in _PROMISED_BITS}


def undelivered(measured: Mapping[str, Accuracy]) -> dict[str, str]:
    """The levels that are less accurate than their name promises, each with the measured arithmetic."""
    return {level: accuracy.kind for level, accuracy in measured.items() if accuracy.bits < _PROMISED_BITS[level]}


def accuracy(product: np.ndarray, x: np.ndarray, y: np.ndarray) -> Accuracy:
    """The accuracy of a product of matrices of the measured size."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = np.abs(product - x @ y) / (np.abs(x) @ np.abs(y))
    rms = float(np.sqrt(np.mean(np.square(error))))
    if not math.isfinite(rms):
        return Accuracy(math.inf, math.inf, 0.0)
    return Accuracy(float(error.max()), rms, max(0.0, _TF32_BITS - math.log2(rms / _TF32_ERROR)) if rms else math.inf)


def _multiply(x: np.ndarray, y: np.ndarray, level: str) -> np.ndarray:
    with Precision(level, jnp.dtype(jnp.float32), None).traced():
        return np.asarray(jax.jit(jnp.matmul)(x, y))
