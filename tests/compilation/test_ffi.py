"""NumPy functions inside compiled programs: shapes, numbers and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.compilation import ffi

PAIR = {"double": jax.ShapeDtypeStruct((3,), jnp.float32), "sum": jax.ShapeDtypeStruct((), jnp.float32)}


def doubled(x: jax.Array) -> dict[str, jax.Array]:
    def compute(given: ffi.Arrays, results: ffi.Arrays) -> None:
        results["double"][...] = 2 * given["x"]
        results["sum"][...] = given["x"].sum(axis=-1)

    return ffi.call("doubled", compute, {"x": x}, PAIR)


@pytest.mark.parametrize("axes", [(), (4, 2), (4, 0)])
def test_external_computation_accepts_axes_added_by_vmap(axes: tuple[int, ...]) -> None:
    function = doubled
    for _ in axes:
        function = jax.vmap(function)
    x = np.arange(np.prod(axes, dtype=int) * 3, dtype=np.float32).reshape(*axes, 3)
    found = jax.jit(function)(x)
    np.testing.assert_array_equal(found["double"], 2 * x)
    np.testing.assert_array_equal(found["sum"], x.sum(axis=-1))


def test_external_computation_handles_changing_batch_sizes() -> None:
    """More sizes than the cache of array views holds."""
    program = jax.jit(jax.vmap(doubled))
    for size in range(1, 3 * ffi._MOST_VIEWS):
        x = np.full((size, 3), size, np.float32)
        np.testing.assert_array_equal(program(x)["double"], 2 * x)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3000, lambda _, y: doubled(y)["double"] / 2 + 1, x))
    np.testing.assert_array_equal(looped(jnp.zeros(3)), np.full(3, 3000))


def test_external_computation_handles_integers_and_float64() -> None:
    def flipped(x: jax.Array, wide: jax.Array) -> dict[str, jax.Array]:
        def compute(given: ffi.Arrays, results: ffi.Arrays) -> None:
            results["not"][...] = 1 - given["flag"]
            results["half"][...] = given["wide"] / 2

        like = {"not": jax.ShapeDtypeStruct((2,), jnp.uint8), "half": jax.ShapeDtypeStruct((), jnp.float64)}
        return ffi.call("flipped", compute, {"flag": x, "wide": wide}, like)

    with jax.enable_x64(True):
        found = jax.jit(flipped)(jnp.array([0, 1], jnp.uint8), jnp.float64(1 + 2**-40))
    assert found["not"].tolist() == [1, 0]
    assert float(found["half"]) == (1 + 2**-40) / 2


def test_error_of_an_external_computation_is_raised_and_the_next_call_works() -> None:
    def strict(x: jax.Array) -> dict[str, jax.Array]:
        def compute(given: ffi.Arrays, results: ffi.Arrays) -> None:
            if given["x"][0] < 0:
                raise ValueError("negative")
            results["y"][...] = given["x"]

        return ffi.call("strict", compute, {"x": x}, {"y": jax.ShapeDtypeStruct((3,), jnp.float32)})

    program = jax.jit(strict)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: negative"):
        jax.block_until_ready(program(-jnp.ones(3)))
    assert program(jnp.ones(3))["y"].tolist() == [1, 1, 1]
