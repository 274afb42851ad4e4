"""Traced functions as ONNX: translations agree with JAX, other operations are an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest

from rlstable.config.networks import Activation, NetworkConfig
from rlstable.export.graph import UnsupportedOperation, to_onnx

MATRIX = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
INPUTS = np.concatenate(
    [np.random.default_rng(1).normal(size=(50, 5)) * 3, np.zeros((1, 5)), np.full((1, 5), 80.0), np.full((1, 5), -80.0)]
).astype(np.float32)


def run(function: Callable[[Any], Any], inputs: np.ndarray = INPUTS) -> np.ndarray:
    model = to_onnx(function, {"x": inputs.shape[1]}, {"y": 5})
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return np.asarray(session.run(["y"], {"x": inputs})[0])


@pytest.mark.parametrize("name", Activation.__args__)
def test_onnx_of_every_activation_agrees_with_jax(name: str) -> None:
    assert NetworkConfig(activation=name)  # type: ignore[arg-type]
    function = getattr(jax.nn, name)
    np.testing.assert_allclose(run(function), jax.vmap(function)(INPUTS), rtol=2e-6, atol=2e-6)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "a matrix": lambda x: x @ MATRIX,
    "the end": lambda x: jnp.split(x, [2])[1],
    "a choice": lambda x: jnp.where(x > 0.5, x, -x),
    "not equal": lambda x: jnp.where(x != x, 0.0, x),
    "bounds": lambda x: jnp.clip(x, -1.0, 2.0),
    "a truth as a number": lambda x: (x > 0).astype(jnp.float32),
    "powers": lambda x: x**3 + jnp.square(x),
    "error function": jax.scipy.special.erf,
    "layer normalisation": lambda x: (x - jnp.mean(x)) * jax.lax.rsqrt(jnp.var(x) + 1e-6) * MATRIX[:, 0],
    "a sum as a number": jnp.sum,
    "a product of vectors": lambda x: x @ MATRIX[:, 0],
    "a sum in every element": lambda x: jnp.split(jnp.broadcast_to(jnp.sum(x, keepdims=True), (5,)) + x, [2])[1],
    "constants": lambda x: x + jnp.sin(jnp.arange(5.0)),  # needs no rule for a sine
    "an unused result": lambda x: (x, jnp.sort(x))[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_onnx_of_every_operation_agrees_with_jax(name: str) -> None:
    function = FUNCTIONS[name]
    np.testing.assert_allclose(run(function), jax.vmap(function)(INPUTS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "what"),
    [(jnp.sort, "sort"), (lambda x: x @ x, "a product of two values"), (lambda x: x.reshape(5, 1)[:, 0], "squeeze")],
)
def test_operation_without_a_translation_is_named(function: Callable[[Any], Any], what: str) -> None:
    with pytest.raises(UnsupportedOperation, match=f"no ONNX for {what}"):
        to_onnx(function, {"x": 5}, {"y": 5})
