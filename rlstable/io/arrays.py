"""Converts a tree of arrays to a list of paths, dtypes and shapes with plain NumPy arrays, as checkpoints store it."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError

PyTree = Any


class Leaf(NamedTuple):
    """One array of the manifest.

    Attributes:
        keys: Parts of the array's path in the tree.
        dtype: Name of the dtype.
        shape: Shape.
        checksum: `checksum` of the bytes; None if unknown.
    """

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None = None

    @property
    def path(self) -> str:
        """The path with slashes."""
        return "/".join(self.keys)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe(path: Any, leaf: Any) -> Leaf:
    """The manifest's entry for a leaf. Typed random keys are described by their integer data.

    Args:
        path: Key path from `jax.tree_util.tree_flatten_with_path`.
        leaf: Array, `ShapeDtypeStruct` or Python number.
    """
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("value",)
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    elif not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return Leaf(keys, np.dtype(leaf.dtype).name, tuple(leaf.shape))


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the array's bytes.

    Detects disk errors, not tampering: it finds every flipped bit and every burst of up to 32 bits. Training waits for
    the checksum, and CRC-32 is several times faster than a cryptographic hash.
    """
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def copy_out(tree: PyTree) -> tuple[list[Leaf], list[np.ndarray]]:
    """Copies every array of a tree to new host memory, and lists the arrays with their checksums.

    Raises:
        ValueError: Two arrays have the same path.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [describe(path, leaf) for path, leaf in paths]
    if (twice := _path_of_two(leaves)) is not None:
        raise ValueError(f"two arrays have the path {twice!r}")
    raw = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in paths]
    views = [np.asarray(view) for view in jax.device_get(raw)]
    # The caller may change a NumPy leaf. On a CPU, a JAX leaf is a view of the device buffer, which a donating program
    # may overwrite.
    arrays = [view.copy() for view in views]
    return [leaf._replace(checksum=checksum(array)) for leaf, array in zip(leaves, arrays, strict=True)], arrays


def require_different_paths(tree: PyTree, what: str) -> None:
    """Checks that a checkpoint can tell the arrays of a tree apart.

    Raises:
        ConfigError: Two arrays have the same path, because a name has a slash; starts with `what`.
    """
    twice = _path_of_two([describe(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]])
    if twice is not None:
        raise ConfigError(f"{what} has two arrays {twice}, because / separates names; rename one of them")


def _path_of_two(leaves: list[Leaf]) -> str | None:
    """A path that two leaves have; None if all paths differ."""
    names = [leaf.path for leaf in leaves]
    return max(names, key=names.count) if len(set(names)) != len(names) else None


def place(array: np.ndarray, like: Any) -> Any:
    """Puts an array on the devices of the template's leaf.

    Uncommitted leaves stay uncommitted, because otherwise jit would compile again after a resume.
    """
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array
    sharding = like.sharding
    if sharding is not None and not sharding.is_fully_addressable:  # each process puts its own shards
        own = jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])
        return jax.random.wrap_key_data(own, impl=_implementation(like)) if is_key(like) else own
    value: Any = array
    if is_key(like):
        value = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=_implementation(like))
    committed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(value, like.sharding if committed else None)


def _implementation(like: Any) -> Any:
    """The implementation of typed random keys."""
    implementations: list[Any] = []
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), struct)
    return implementations[0]


def require_fit(saved: list[Leaf], wanted: list[Leaf], folder: Path) -> None:
    """Checks that the saved arrays have the paths, dtypes and shapes of the wanted arrays.

    Raises:
        ConfigError: They differ; names the first different path and both types.
    """
    by_path = {leaf.path: leaf for leaf in saved}
    names = {leaf.path for leaf in wanted}
    differences = []
    for leaf in wanted:
        other = by_path.get(leaf.path)
        if other is None:
            differences.append(f"{leaf.path} is missing there and {leaf} here")
        elif str(other) != str(leaf):
            differences.append(f"{leaf.path} is {other} there and {leaf} here")
    differences += [f"{leaf.path} is {leaf} there and missing here" for leaf in saved if leaf.path not in names]
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise ConfigError(
            f"resume: {folder} does not fit this configuration: {differences[0]}{more}; "
            "resume with the configuration the folder was trained with"
        )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
