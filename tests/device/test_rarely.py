"""What is applied once or not at all."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.rarely import apply_if


def test_applied_once_or_not_at_all():
    """The function where the predicate holds, else the operand; a second turn would add twice."""
    operand = {"x": jnp.arange(3.0), "n": jnp.int32(4)}

    def bump(tree: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, tree)

    for apply in (apply_if, jax.jit(apply_if, static_argnums=1)):
        jax.tree.map(np.testing.assert_array_equal, bump(operand), apply(jnp.array(True), bump, operand))
        jax.tree.map(np.testing.assert_array_equal, operand, apply(jnp.array(False), bump, operand))


def test_under_vmap_and_scan():
    """Each by its own predicate."""
    predicates = jnp.array([True, False, True, False])
    got = jax.vmap(lambda p, x: apply_if(p, lambda y: y * 10.0, x))(predicates, jnp.arange(1.0, 5.0))
    np.testing.assert_array_equal(got, [10, 2, 30, 4])
    total, _ = jax.lax.scan(lambda x, p: (apply_if(p, lambda y: 2 * y + 1, x), None), jnp.int32(1), predicates)
    assert total == 7


def test_bad_numbers_of_the_other_choice_are_left_out():
    """What the function would give is not computed where it is not wanted."""
    got = apply_if(jnp.array(False), lambda x: x * jnp.nan, jnp.ones(2))
    np.testing.assert_array_equal(got, 1.0)
