"""Measured accuracy of matrix products: which arithmetic it is, and flags that the device ignores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.doctor import arithmetic
from rlstable.doctor.arithmetic import Accuracy, measure, measure_x64, undelivered

FLOAT32 = Accuracy(2.6e-7, 2.8e-8, 21.1)
TF32 = Accuracy(2e-4, 3e-5, 11.0)
BFLOAT16 = Accuracy(1.5e-3, 2e-4, 8.0)


def imitated(bits: int):
    """A matrix product like that of tensor cores: factors rounded to `bits`, sums in float32."""

    def multiply(x: np.ndarray, y: np.ndarray, level: str) -> np.ndarray:
        narrow = [arithmetic._rounded(a, bits).astype(np.float32) for a in (x, y)]
        return np.matmul(*narrow)

    return multiply


def test_cpu_multiplies_in_float32_at_every_level() -> None:
    measured = measure()
    assert list(measured) == ["default", "high", "highest"]
    assert {accuracy.kind for accuracy in measured.values()} == {"float32"}
    assert all(accuracy.rms_error < 1e-7 for accuracy in measured.values())
    assert undelivered(measured) == {}
    assert measure() == measured


@pytest.mark.parametrize(("bits", "kind"), [(24, "float32"), (16, "bfloat16 x3"), (11, "tf32"), (8, "bfloat16")])
def test_arithmetic_of_a_product_is_recognised_by_its_error(
    bits: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_multiply", imitated(bits))
    (accuracy,) = measure(("default",)).values()
    assert accuracy.kind == kind
    if bits < 20:  # with more bits the error of float32 sums dominates
        assert accuracy.bits == pytest.approx(bits, abs=0.1)


def test_precision_flag_that_the_device_ignores_is_reported() -> None:
    assert undelivered({"default": TF32, "high": TF32, "highest": TF32}) == {"highest": "tf32"}
    assert undelivered({"default": BFLOAT16, "high": BFLOAT16}) == {"high": "bfloat16"}
    assert undelivered({"default": BFLOAT16, "tensorfloat32": TF32, "float32": FLOAT32}) == {}


def test_x64_computes_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_x64() == 0.0
    assert not jax.config.jax_enable_x64
    assert jnp.zeros(1).dtype == jnp.float32


def test_x64_that_computes_in_float32_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = jax.jit
    monkeypatch.setattr(arithmetic.jax, "jit", lambda _: jit(lambda x, y: x.astype("f") @ y.astype("f")))
    assert 1e-9 < measure_x64() < 1e-6
