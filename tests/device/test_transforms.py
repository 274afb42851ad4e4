"""Functions that run only if a predicate is true, and functions of one seed mapped over several."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.device.transforms import apply_if, select_if, vmap_seeds


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of device that functions are traced for; they run on a CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return str(request.param)


@pytest.mark.parametrize("compiled", [False, True])
def test_apply_if_runs_the_function_once_or_not_at_all(compiled: bool) -> None:
    """A second turn of the loop would add twice."""
    operand = {"x": jnp.arange(3.0), "n": jnp.int32(4)}

    def bump(tree: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, tree)

    apply = jax.jit(apply_if, static_argnums=1) if compiled else apply_if
    jax.tree.map(np.testing.assert_array_equal, bump(operand), apply(jnp.array(True), bump, operand))
    jax.tree.map(np.testing.assert_array_equal, operand, apply(jnp.array(False), bump, operand))


def test_apply_if_uses_each_predicate_under_vmap_and_scan() -> None:
    predicates = jnp.array([True, False, True, False])
    mapped = jax.vmap(lambda p, x: apply_if(p, lambda y: y * 10.0, x))(predicates, jnp.arange(1.0, 5.0))
    np.testing.assert_array_equal(mapped, [10, 2, 30, 4])
    total, _ = jax.lax.scan(lambda x, p: (apply_if(p, lambda y: 2 * y + 1, x), None), jnp.int32(1), predicates)
    assert total == 7


@pytest.mark.usefixtures("device")
def test_select_if_takes_the_result_only_where_the_predicate_is_true() -> None:
    operand = {"x": jnp.arange(3.0), "key": jax.random.key(4), "empty": jnp.zeros((0, 2))}

    def changed(tree: Any) -> Any:
        return {"x": tree["x"] * jnp.nan, "key": jax.random.fold_in(tree["key"], 1), "empty": tree["empty"]}

    for predicate, expected in ((True, changed(operand)), (False, operand)):
        found = jax.jit(lambda p, tree: select_if(p, changed, tree))(jnp.array(predicate), operand)
        for a, b in zip(plain(found), plain(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    predicates = jnp.array([True, False, True, False])
    mapped = jax.vmap(lambda p, x: select_if(p, lambda y: y * 10.0, x))(predicates, jnp.arange(1.0, 5.0))
    np.testing.assert_array_equal(mapped, [10, 2, 30, 4])


def plain(tree: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves(tree)
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def test_vmap_seeds_of_one_seed_is_the_function_itself() -> None:
    def step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"x": 2 * state["x"], "key": jax.random.split(state["key"])[0]}

    start = {"x": jnp.ones(3), "key": jax.random.key(0)}
    assert str(jax.make_jaxpr(vmap_seeds(step))((start,))) == str(jax.make_jaxpr(step)(start))
