"""Many small arrays as one: what crosses the boundary of a compiled program costs by the array, not by the byte."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_STATIC = {"static": True}
Layout = tuple[tuple[str, int | None], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedDict(Mapping[str, Any]):
    """Named scalars and vectors behind one array, read like a dictionary.

    Attributes:
        whole: An array `[n]`, or a pytree of arrays `[n]`.
        layout: Names in order, each with its length, None for a scalar.
    """

    whole: Any
    layout: Layout = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> PackedDict:
        """Packs arrays of one type, each a scalar or a vector, or pytrees of the same structure."""
        if not parts:
            return cls((), ())
        layout = tuple((name, _length(jax.tree.leaves(part)[0])) for name, part in sorted(parts.items()))
        ordered = [parts[name] for name, _ in layout]
        return cls(jax.tree.map(lambda *x: jnp.concatenate([jnp.atleast_1d(y) for y in x]), *ordered), layout)

    @functools.cached_property
    def places(self) -> dict[str, int | slice]:
        """The slice of each part in the whole."""
        places: dict[str, int | slice] = {}
        start = 0
        for name, length in self.layout:
            places[name] = start if length is None else slice(start, start + length)
            start += 1 if length is None else length
        return places

    def __getitem__(self, name: str) -> Any:
        place: Any = self.places[name]
        if isinstance(self.whole, np.ndarray):  # read many times an iteration on the host, where a tree costs more
            return self.whole[place]
        return jax.tree.map(lambda x: x[place], self.whole)

    def __contains__(self, name: object) -> bool:
        return name in self.places

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __eq__(self, other: object) -> bool:
        """Compares by identity: arrays have no truth value."""
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _length(x: Any) -> int | None:
    return x.shape[0] if x.ndim else None


def joined(parts: Sequence[Any], axis: int = 0) -> Any:
    """Arrays one after another, on the host unless they are traced or, what NumPy does not know, typed random keys."""
    traced = isinstance(parts[0], jax.core.Tracer) or jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key)
    return jax.lax.concatenate(parts, axis) if traced else np.concatenate(parts, axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """A batch of pytrees, one row each, as one matrix per type.

    Attributes:
        matrices: `[rows, n]` by type name.
        shapes: Type name and shape without the rows of every leaf, in order.
        structure: What the leaves are leaves of.
    """

    matrices: dict[str, Any]
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata=_STATIC)
    structure: Any = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of(cls, tree: Any) -> PackedRows:
        """Packs arrays whose leading axis is the rows, on the host or inside a program."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple((str(x.dtype), tuple(x.shape[1:])) for x in leaves)
        matrices = {}
        for kind in sorted({kind for kind, _ in shapes}):
            own = [x.reshape(x.shape[0], -1) for x, (name, _) in zip(leaves, shapes, strict=True) if name == kind]
            matrices[kind] = joined(own, axis=1)
        return cls(matrices, shapes, structure)

    def __len__(self) -> int:
        return next(iter(self.matrices.values())).shape[0]

    def take(self, index: Any) -> Any:
        """The pytree of the rows at `index`, whose axes replace the leading one."""
        taken = {kind: matrix[index] for kind, matrix in self.matrices.items()}
        used = dict.fromkeys(taken, 0)
        leaves = []
        for kind, shape in self.shapes:
            start, size = used[kind], int(np.prod(shape))
            used[kind] = start + size
            leaves.append(taken[kind][..., start : start + size].reshape((*index.shape, *shape)))
        return jax.tree.unflatten(self.structure, leaves)
