"""A function of one seed as one of several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device.side_by_side import side_by_side


def walk(state: dict[str, Any]) -> dict[str, Any]:
    """Loops as often as the state says, draws, and gives back other shapes than it takes."""

    def step(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        key, x = carry
        key, own = jax.random.split(key)
        return key, x + jax.random.normal(own, x.shape)

    key, x = jax.lax.fori_loop(0, state["times"], step, (state["key"], state["x"]))
    return {"key": key, "x": x, "sum": x.sum(), "empty": state["empty"]}


def state(seed: int, times: int, value: float = 0.0) -> dict[str, Any]:
    return {
        "key": jax.random.key(seed), "x": jnp.full((3,), value), "times": jnp.int32(times), "empty": jnp.zeros((0, 2)),
    }  # fmt: skip


def plain(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def test_each_has_what_it_would_have_alone() -> None:
    states = (state(0, 3), state(1, 0), state(2, 7))
    found = jax.jit(side_by_side(walk))(states)
    for own, given in zip(found, states, strict=True):
        for a, b in zip(plain(own), plain(jax.jit(walk)(given)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_number_of_one_changes_no_bit_of_the_others(bad: float) -> None:
    program = jax.jit(side_by_side(walk))
    healthy = program((state(0, 3), state(1, 5), state(2, 4)))
    struck = program((state(0, 3), state(1, 500, bad), state(2, 4)))
    for place in (0, 2):
        for a, b in zip(plain(healthy[place]), plain(struck[place]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert not np.isfinite(struck[1]["sum"])


def test_one_is_the_function_itself() -> None:
    alone, given = jax.make_jaxpr(walk)(state(0, 3)), (state(0, 3),)
    assert str(jax.make_jaxpr(side_by_side(walk))(given)) == str(alone)
