"""Measured accuracy of matrix products: which arithmetic it is, and flags that the device ignores."""

from __future__ import annotations

import numpy as np
import pytest

from rlstable.doctor import arithmetic
from rlstable.doctor.arithmetic import Accuracy, measure, undelivered

FLOAT32, TF32 = Accuracy(2.6e-7, 2.8e-8, 21.1), Accuracy(2e-4, 3e-5, 11.0)
BFLOAT16 = Accuracy(1.5e-3, 2e-4, 8.0)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    fraction, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(fraction, bits)), exponent - bits).astype(np.float32)


def test_cpu_multiplies_in_float32_at_every_level() -> None:
    measured = measure()
    assert list(measured) == ["default", "high", "highest"]
    assert {accuracy.kind for accuracy in measured.values()} == {"float32"}
    assert all(accuracy.rms_error < 1e-7 for accuracy in measured.values())
    assert undelivered(measured) == {}


@pytest.mark.parametrize(("bits", "kind"), [(24, "float32"), (16, "bfloat16 x3"), (11, "tf32"), (8, "bfloat16")])
def test_arithmetic_of_a_product_is_recognised_by_its_error(
    bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensor cores round the factors and sum in float32."""
    monkeypatch.setattr(arithmetic, "_multiply", lambda x, y, level: rounded(x, bits) @ rounded(y, bits))
    accuracy = measure()["default"]
    assert accuracy.kind == kind
    if bits < 20:  # with more bits the error of float32 sums dominates
        assert accuracy.bits == pytest.approx(bits, abs=0.1)


def test_precision_flag_that_the_device_ignores_is_reported() -> None:
    assert undelivered({"default": TF32, "high": TF32, "highest": TF32}) == {"highest": "tf32"}
    assert undelivered({"default": BFLOAT16, "high": BFLOAT16, "highest": FLOAT32}) == {"high": "bfloat16"}
