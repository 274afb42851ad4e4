"""What is rarely needed is computed only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def apply_if(predicate: jax.Array, function: Callable[[Any], Any], operand: Any) -> Any:
    """`function(operand)` where the scalar predicate holds, else the operand itself, in place.

    A while loop of at most one turn: XLA updates its carry in place, where the branches of `lax.cond` copy what they
    pass on.
    """

    def once(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return jnp.zeros((), bool), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (predicate, operand))[1]
