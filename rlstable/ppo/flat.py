"""Joins parameters into one vector while SGD runs, if that is faster.

On a vector an Adam step, a norm, a guard's check and a select are one operation each, for any number of layers. That
means fewer kernels to compile and to launch. On a CPU launches are cheap and kernels of different layers run in
parallel, so only small networks are joined.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from rlstable.device.trees import PyTree

# Number of parameters. On a CPU two networks with layers 64, 64 run 3 % faster if joined, with 128, 128 3 % slower.
_MAX_SIZE_ON_CPU = 2**14


@dataclasses.dataclass(frozen=True)
class ParamFlattener:
    """Joins the arrays of a parameter tree into one vector and splits the vector again.

    With `joined=False`, `join` and `split` return their argument.
    """

    structure: jax.tree_util.PyTreeDef
    sizes: PyTree  # number of elements of each array
    unravel: Callable[[jax.Array], PyTree]
    joined: bool = True

    @classmethod
    def of(cls, params: PyTree) -> ParamFlattener:
        """The fastest layout on this device, for parameters that all have one type."""
        vector, unravel = ravel_pytree(params)  # JAX leaves an unused vector out of the program
        joined = vector.size <= _MAX_SIZE_ON_CPU or jax.default_backend() != "cpu"
        return cls(jax.tree.structure(params), jax.tree.map(jnp.size, params), unravel, joined)

    def join(self, params: PyTree) -> PyTree:
        """Joins parameters, or a tree with the same structure, into a vector `[n]`."""
        return ravel_pytree(params)[0] if self.joined else params

    def split(self, vector: PyTree) -> PyTree:
        """Splits a vector `[n]` into the parameter tree."""
        return self.unravel(vector) if self.joined else vector

    def per_network(self, factors: dict[str, jax.Array], vector: jax.Array) -> jax.Array:
        """The vector `[n]` with the part of each network times its factor, by name."""
        counts = [sum(jax.tree.leaves(self.sizes[name])) for name in sorted(factors)]
        # A vector of factors is slower on a CPU, and rounds in another way than one factor for all.
        parts = zip(sorted(factors), jax.lax.split(vector, counts), strict=True)
        return jnp.concatenate([factors[name] * part for name, part in parts])

    def join_subtrees(self, tree: PyTree) -> PyTree:
        """Joins every subtree that has the structure of the parameters, for example Adam's moments."""
        return jax.tree.map(lambda x: self.join(x) if self._fits(x) else x, tree, is_leaf=self._fits)

    def split_subtrees(self, tree: PyTree, like: PyTree) -> PyTree:
        """Inverse of `join_subtrees`; `like` is a tree with the structure of its argument."""
        return jax.tree.map(lambda old, x: self.split(x) if self._fits(old) else x, like, tree, is_leaf=self._fits)

    def _fits(self, tree: PyTree) -> bool:
        return bool(jax.tree.structure(tree) == self.structure)
