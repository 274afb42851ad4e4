"""Packs many small arrays into one, because a compiled program's call overhead grows with the number of arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.trees import PyTree

_STATIC = {"static": True}
Layout = tuple[tuple[str, int | None], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedDict(Mapping[str, PyTree]):
    """Named scalars and vectors stored in one array `[n]` or a pytree of such arrays; a read-only dictionary."""

    whole: PyTree
    layout: Layout = dataclasses.field(metadata=_STATIC)  # names in order, each with its length; None for a scalar

    @classmethod
    def of(cls, parts: Mapping[str, PyTree]) -> PackedDict:
        """Packs scalars and vectors of one dtype, or pytrees of them with the same structure."""
        if not parts:
            return cls((), ())
        layout = tuple((name, _length(jax.tree.leaves(part)[0])) for name, part in sorted(parts.items()))
        ordered = [parts[name] for name, _ in layout]
        return cls(jax.tree.map(lambda *x: jnp.concatenate([jnp.atleast_1d(y) for y in x]), *ordered), layout)

    @functools.cached_property
    def indices(self) -> dict[str, int | slice]:
        """The index or slice of each part in `whole`."""
        indices: dict[str, int | slice] = {}
        start = 0
        for name, length in self.layout:
            indices[name] = start if length is None else slice(start, start + length)
            start += 1 if length is None else length
        return indices

    def __getitem__(self, name: str) -> PyTree:
        index: Any = self.indices[name]
        if isinstance(self.whole, np.ndarray):  # the host reads metrics often, and `jax.tree.map` is slower
            return self.whole[index]
        return jax.tree.map(lambda x: x[index], self.whole)

    def __contains__(self, name: object) -> bool:
        return name in self.indices

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def __eq__(self, other: object) -> bool:
        """Compares by identity, because comparing arrays gives an array."""
        return self is other

    def __hash__(self) -> int:
        return id(self)


def _length(x: jax.Array) -> int | None:
    return x.shape[0] if x.ndim else None


def concatenate(parts: Sequence[PyTree], axis: int = 0) -> PyTree:
    """Concatenates arrays: with JAX if they are traced or typed random keys, else with NumPy."""
    traced = any(isinstance(x, jax.core.Tracer) for x in parts) or jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key)
    return jax.lax.concatenate(parts, axis) if traced else np.concatenate(parts, axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """A batch of pytrees, one per row, stored as one matrix per dtype."""

    matrices: dict[str, jax.Array]  # `[rows, n]`, by dtype name
    # Dtype name and shape of every leaf, without the row axis, in order.
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(metadata=_STATIC)
    structure: jax.tree_util.PyTreeDef = dataclasses.field(metadata=_STATIC)

    @classmethod
    def of(cls, tree: PyTree) -> PackedRows:
        """Packs arrays whose leading axis is the rows. Outside jit all but random keys become NumPy arrays."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple((str(x.dtype), tuple(x.shape[1:])) for x in leaves)
        matrices = {}
        for kind in sorted({kind for kind, _ in shapes}):
            flat = [x.reshape(x.shape[0], -1) for x, (name, _) in zip(leaves, shapes, strict=True) if name == kind]
            matrices[kind] = concatenate(flat, axis=1)
        return cls(matrices, shapes, structure)

    def __len__(self) -> int:
        return next(iter(self.matrices.values())).shape[0]

    def take(self, index: jax.typing.ArrayLike) -> PyTree:
        """The pytree of the rows at `index`. The axes of `index` replace the row axis."""
        return dataclasses.replace(self, matrices={kind: x[index] for kind, x in self.matrices.items()}).unpacked()

    def unpacked(self) -> PyTree:
        """The pytree of all rows."""
        used = dict.fromkeys(self.matrices, 0)
        leaves = []
        for kind, shape in self.shapes:
            rows, start, size = self.matrices[kind], used[kind], int(np.prod(shape))
            used[kind] = start + size
            leaves.append(rows[..., start : start + size].reshape((*rows.shape[:-1], *shape)))
        return jax.tree.unflatten(self.structure, leaves)

    def cast_like(self, other: PackedRows) -> PackedRows:
        """The same rows with the dtypes of another `PackedRows` of the same tree. For use under jit."""
        leaves = jax.tree.leaves(self.unpacked())
        # Cast only if the dtype changes: NumPy cannot parse the dtype of typed random keys.
        kinds = [kind for kind, _ in other.shapes]
        cast = [x if str(x.dtype) == kind else x.astype(kind) for x, kind in zip(leaves, kinds, strict=True)]
        return PackedRows.of(jax.tree.unflatten(self.structure, cast))
