"""Function transformations on top of JAX's: run only if a traced predicate is true, and map over seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree

PerSeed = tuple[PyTree, ...]


def apply_if(predicate: jax.Array, function: Callable[[PyTree], PyTree], operand: PyTree) -> PyTree:
    """Runs a function only when a traced predicate is true, without the copies of `lax.cond`.

    A while loop of at most one step: XLA updates its carry in place, while the branches of `lax.cond` copy their
    operands.

    Args:
        predicate: bool scalar.
        function: From a tree to a tree of the same shapes and types.
        operand: The function's argument.

    Returns:
        `function(operand)` where the predicate is true, else the operand.
    """

    def once(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        return jnp.zeros((), bool), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (predicate, operand))[1]


def vmap_seeds(function: Callable[[PyTree], PyTree]) -> Callable[[PerSeed], PerSeed]:
    """Maps a function of one argument over a tuple of arguments, one for each seed.

    Arguments are stacked inside, so each seed's arrays are ordinary arrays outside. With one argument the result equals
    the function's result, with the same operations.

    Args:
        function: From any pytree to any pytree; JAX can trace it.

    Returns:
        A function from a tuple of arguments to the tuple of results.
    """

    @functools.wraps(function)  # JAX names a program by its function
    def mapped(arguments: PerSeed) -> PerSeed:
        if len(arguments) == 1:
            return (function(*arguments),)
        results = jax.vmap(function)(jax.tree.map(lambda *each: jnp.stack(each), *arguments))
        return tuple(jax.tree.map(lambda x, seed=seed: x[seed], results) for seed in range(len(arguments)))

    return mapped
