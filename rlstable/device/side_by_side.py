"""The same computation for several seeds at once, none of whose numbers reaches another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Each = tuple[Any, ...]


def side_by_side(function: Callable[[Any], Any]) -> Callable[[Each], Each]:
    """A function of one argument as one of several, with a result for each.

    Every operation is mapped over them, and what a loop or a choice does for one is kept from the others by a select.
    They are stacked inside, so that whoever holds one of them has an array like any other. For a single argument it is
    the function itself, with the same operations.

    Args:
        function: From any pytree to any pytree; jax can trace it.
    """

    @functools.wraps(function)  # programs are known by the name of what they compute
    def mapped(arguments: Each) -> Each:
        if len(arguments) == 1:
            return (function(*arguments),)
        found = jax.vmap(function)(jax.tree.map(lambda *own: jnp.stack(own), *arguments))
        return tuple(jax.tree.map(lambda x, place=place: x[place], found) for place in range(len(arguments)))

    return mapped
