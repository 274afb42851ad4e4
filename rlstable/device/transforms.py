"""Function transformations on top of JAX's: run only if a traced predicate is true, and map over seeds.

On a GPU the host reads the predicate of a loop without a fixed length before every turn, and the GPU idles meanwhile.
So inside of loops, programs for accelerators use a form that the host need not know: `select_if`.
"""

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
    operands. For a cheap function inside a loop use `select_if`. The function keeps shapes and types.
    """

    def once(carry: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
        return jnp.zeros((), bool), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], once, (predicate, operand))[1]


def select_if(predicate: jax.Array, function: Callable[[PyTree], PyTree], operand: PyTree) -> PyTree:
    """`apply_if` for a cheap function inside a loop: an accelerator always runs the function, and a select decides."""
    if not on_accelerator():
        return apply_if(predicate, function, operand)
    return jax.tree.map(lambda new, old: jnp.where(predicate, new, old), function(operand), operand)


def on_accelerator() -> bool:
    """Whether programs are for an accelerator, whose loops wait for the host; on a CPU a predicate costs nothing."""
    return jax.default_backend() != "cpu"


def vmap_seeds(function: Callable[[PyTree], PyTree]) -> Callable[[PerSeed], PerSeed]:
    """Maps a function of one argument over a tuple of arguments, one for each seed.

    Arguments are stacked inside, so each seed's arrays are ordinary arrays outside. With one argument the result equals
    the function's result, with the same operations.
    """

    @functools.wraps(function)  # JAX names a program by its function
    def mapped(arguments: PerSeed) -> PerSeed:
        if len(arguments) == 1:
            return (function(*arguments),)
        results = jax.vmap(function)(jax.tree.map(lambda *each: jnp.stack(each), *arguments))
        return tuple(jax.tree.map(lambda x, seed=seed: x[seed], results) for seed in range(len(arguments)))

    return mapped
