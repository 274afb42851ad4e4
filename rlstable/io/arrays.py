"""A tree of arrays as checkpoints store it: plain NumPy arrays, and a manifest with their paths, dtypes and shapes.

A manifest is a JSON object with its format, arrays and host data, and a checksum of these.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable import __version__
from rlstable.config import ConfigError

FORMAT = 3
PyTree = Any


class Damaged(Exception):
    """A checkpoint, or a part of it, is damaged. The message is one line."""


class Leaf(NamedTuple):
    """One array of the manifest. `keys` are the parts of its path in the tree; the checksum of a template is None."""

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    checksum: int | None = None

    @property
    def path(self) -> str:
        """The keys between slashes; a slash in a key is escaped, so that two arrays never have one path."""
        return "/".join(key.replace("/", "%2F") for key in self.keys)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def describe(path: Any, leaf: Any) -> Leaf:
    """The manifest's entry for an array, a `ShapeDtypeStruct` or a number, at a key path of JAX.

    Typed random keys are described by their integer data.
    """
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path) or ("value",)
    if is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    elif not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return Leaf(keys, np.dtype(leaf.dtype).name, tuple(leaf.shape))


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the array's bytes: detects disk errors, not tampering, several times faster than a secure hash."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def copy_out(tree: PyTree) -> tuple[list[Leaf], list[np.ndarray]]:
    """Copies every array of a tree to new host memory, and lists the arrays with their checksums."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves = [describe(path, leaf) for path, leaf in paths]
    raw = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in paths]
    views = [np.asarray(view) for view in jax.device_get(raw)]
    # The caller may change a NumPy leaf. On a CPU, a JAX leaf is a view of the device buffer, which a donating program
    # may overwrite.
    arrays = [view.copy() for view in views]
    return [leaf._replace(checksum=checksum(array)) for leaf, array in zip(leaves, arrays, strict=True)], arrays


def place(array: np.ndarray, like: Any) -> Any:
    """Puts an array on the devices of the template's leaf.

    Uncommitted leaves stay uncommitted, because otherwise jit would compile again after a resume.
    """
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return array
    sharding = like.sharding
    if sharding is not None and not sharding.is_fully_addressable:  # each process puts its own shards
        own = jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])
        return jax.random.wrap_key_data(own, impl=implementation(like)) if is_key(like) else own
    value: Any = array
    if is_key(like):
        value = jax.random.wrap_key_data(jax.numpy.asarray(array), impl=implementation(like))
    committed = like.committed if isinstance(like, jax.Array) else like.sharding is not None
    return jax.device_put(value, like.sharding if committed else None)


def implementation(like: Any) -> Any:
    """The implementation of a typed random key."""
    implementations: list[Any] = []
    struct = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), struct)
    return implementations[0]


def require_fit(saved: list[Leaf], wanted: list[Leaf], folder: Path) -> None:
    """Raises a `ConfigError` about the first path if saved and wanted arrays differ in path, dtype or shape."""
    here, there = ({leaf.path: str(leaf) for leaf in leaves} for leaves in (wanted, saved))
    different = [path for path in {**here, **there} if here.get(path) != there.get(path)]
    if different:
        first, more = different[0], f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise ConfigError(
            f"resume: {folder} does not fit this configuration: {first} is {there.get(first, 'missing')} there and "
            f"{here.get(first, 'missing')} here{more}; resume with the configuration the folder was trained with"
        )


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Manifest(NamedTuple):
    """The manifest of one checkpoint."""

    state: list[Leaf]
    policy: list[Leaf]
    host: dict[str, Any]
    score: float | None


def manifest_to_json(
    number: int, state: list[Leaf], policy: list[Leaf], host: Mapping[str, Any], score: float | None
) -> dict[str, Any]:
    """The manifest of a new checkpoint as JSON data; `score` is finite or None."""
    body = {
        "format": FORMAT,
        "rlstable": __version__,
        "number": number,
        "score": score,
        "host": host,
        "state": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in state],
        "policy": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in policy],
    }
    return {**body, "checksum": json_checksum(body)}


def manifest_from_json(data: Any, folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint's folder, whose name is its number.

    Raises `Damaged`, or a `ConfigError` if the manifest has another format.
    """
    if not isinstance(data, dict):
        raise Damaged("the manifest is not a JSON object")
    body = {key: value for key, value in data.items() if key != "checksum"}
    if data.get("checksum") != json_checksum(body):
        raise Damaged("the checksum of the manifest is wrong")
    if body["format"] != FORMAT:
        raise ConfigError(
            f"{folder}: saved by rlstable {body['rlstable']} in checkpoint format {body['format']}, but rlstable "
            f"{__version__} reads only format {FORMAT}; use rlstable {body['rlstable']}"
        )
    if body["number"] != int(folder.name):
        raise Damaged(f"it is checkpoint {body['number']} under another number")
    host, score = body["host"], body["score"]
    if score is not None and not (isinstance(score, float | int) and math.isfinite(score)):
        raise Damaged("the score is not a number")
    if not isinstance(host, dict):
        raise Damaged("the host data is not a JSON object")
    leaves = {
        item: [Leaf(tuple(keys), dtype, tuple(shape), checksum) for keys, dtype, shape, checksum in body[item]]
        for item in ("state", "policy")
    }
    return Manifest(**leaves, host=host, score=score)


def json_checksum(data: Any) -> int:
    """CRC-32 of JSON data, independent of spaces and of the order of members."""
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
