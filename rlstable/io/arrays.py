"""A tree of arrays as a checkpoint sees it: a list of paths, dtypes and shapes, and plain NumPy arrays."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable.config import ConfigError

PyTree = Any


class Leaf(NamedTuple):
    """One array as the manifest lists it.

    Attributes:
        keys: The parts of its path.
        dtype: Name of its type.
        shape: Its shape.
        checksum: Of its bytes (`checksum`); None where it is not known.
    """

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None = None

    @property
    def path(self) -> str:
        """The parts of the path, joined by a slash."""
        return "/".join(self.keys)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe(path: Any, leaf: Any) -> Leaf:
    """The manifest's entry for a leaf; typed random keys are listed as the integers they are made of.

    Args:
        path: Key path, as `jax.tree_util.tree_flatten_with_path` gives it.
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

    It is there against disks, not against people, and notices every single flipped bit and burst of up to 32 for
    certain. Training waits for it, and it is several times quicker than a cryptographic hash.
    """
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def copy_out(tree: PyTree) -> tuple[list[Leaf], list[np.ndarray]]:
    """Lists and copies every array of a tree into private memory, with its checksum.

    Raises:
        ValueError: Two arrays have the same path.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [describe(path, leaf) for path, leaf in paths]
    names = [leaf.path for leaf in leaves]
    if len(set(names)) != len(names):
        raise ValueError(f"two arrays have the path {max(names, key=names.count)!r}")
    raw = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in paths]
    views = [np.asarray(view) for view in jax.device_get(raw)]
    # A NumPy leaf is still the caller's, and on a CPU a jax leaf is a view of the device's own buffer, which
    # a donating program may overwrite.
    arrays = [view.copy() for view in views]
    return [leaf._replace(checksum=checksum(array)) for leaf, array in zip(leaves, arrays, strict=True)], arrays


def place(array: np.ndarray, like: Any) -> Any:
    """Puts an array where the template's leaf is.

    Uncommitted leaves stay uncommitted, otherwise jit would compile again after a resume.
    """
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array
    value: Any = array
    if is_key(like):
        implementations: list[Any] = []
        struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
        jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), struct)
        value = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=implementations[0])
    committed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(value, like.sharding if committed else None)


def require_fit(saved: list[Leaf], wanted: list[Leaf], folder: Path) -> None:
    """Checks that what was saved is what is wanted.

    Raises:
        ConfigError: Names the first path at which they differ, what is saved and what is wanted.
    """
    have = {leaf.path: leaf for leaf in saved}
    names = {leaf.path for leaf in wanted}
    faults = []
    for leaf in wanted:
        other = have.get(leaf.path)
        if other is None:
            faults.append(f"{leaf.path} is missing there and {leaf} here")
        elif str(other) != str(leaf):
            faults.append(f"{leaf.path} is {other} there and {leaf} here")
    faults += [f"{leaf.path} is {leaf} there and missing here" for leaf in saved if leaf.path not in names]
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise ConfigError(
            f"resume: {folder} does not fit this configuration: {faults[0]}{more}; "
            "resume with the configuration the folder was trained with"
        )


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed random key."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
