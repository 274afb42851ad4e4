"""Parameters as one vector while SGD runs.

A step of Adam, a norm, a verdict and a choice are then an operation each, however many layers there are: fewer kernels
to compile and to launch.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where each array of some parameters stands in their vector.

    Attributes:
        structure: What the arrays are leaves of.
        shapes: Of the arrays, in order.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Any) -> Layout:
        """The layout of arrays that are all of one type."""
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, tuple(x.shape for x in leaves))

    def join(self, params: Any) -> jax.Array:
        """The vector `[n]` of parameters, or of anything laid out as they are."""
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(params)])

    def split(self, vector: jax.Array) -> Any:
        """The arrays of a vector `[n]`."""
        parts = jax.lax.split(vector, [math.prod(shape) for shape in self.shapes])
        return self.structure.unflatten([x.reshape(shape) for x, shape in zip(parts, self.shapes, strict=True)])

    def join_in(self, tree: Any) -> Any:
        """A tree with every part of it that is laid out as the parameters are, like Adam's moments, as a vector."""
        return jax.tree.map(lambda x: self.join(x) if self._fits(x) else x, tree, is_leaf=self._fits)

    def split_in(self, tree: Any, like: Any) -> Any:
        """What `join_in` was given, with the numbers of another result of it.

        Args:
            tree: As `join_in` returns it.
            like: As it was given.
        """
        return jax.tree.map(lambda old, x: self.split(x) if self._fits(old) else x, like, tree, is_leaf=self._fits)

    def _fits(self, tree: Any) -> bool:
        return bool(jax.tree.structure(tree) == self.structure)
