"""Manifest of a checkpoint: format, every array, and checksums of everything that is read back.

The manifest is one JSON object whose member `checksum` covers all others, in every format from 1 on, so that a newer
format differs from a damaged manifest. Format 0 is that of rlstable before it had formats: no checksums, and the score
beside the manifest.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstable import __version__
from rlstable.config import ConfigError
from rlstable.io.arrays import Leaf

FORMAT = 1
_ITEMS = ("state", "policy")


class Damaged(Exception):
    """A checkpoint, or a part of it, that is not what was saved. Its text says what is wrong, in one line."""


class Manifest(NamedTuple):
    """The manifest of one checkpoint.

    Attributes:
        format: Its format; 0 for one without checksums.
        state: The arrays of the training state.
        policy: The arrays of the policy.
        host: Checksum of the host data; None in format 0.
        score: What the policy is worth; None where it has no score, and in format 0.
    """

    format: int
    state: list[Leaf]
    policy: list[Leaf]
    host: int | None
    score: float | None


def to_json(state: list[Leaf], policy: list[Leaf], host: Mapping[str, Any], score: float | None) -> dict[str, Any]:
    """The manifest of a checkpoint that is about to be written.

    Args:
        state: The arrays of the training state, with checksums.
        policy: The arrays of the policy, with checksums.
        host: The host data.
        score: What the policy is worth; a finite number or None.
    """
    body = {
        "format": FORMAT,
        "rlstable": __version__,
        "state": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in state],
        "policy": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in policy],
        "host": json_checksum(host),
        "score": score,
    }
    return {**body, "checksum": json_checksum(body)}


def from_json(data: Any, folder: Path) -> Manifest:
    """Reads a manifest.

    Args:
        data: The JSON data.
        folder: That of the checkpoint, for messages.

    Raises:
        Damaged: It is not what was saved.
        ConfigError: It is of a format that this rlstable does not know.
    """
    if not isinstance(data, dict):
        raise Damaged("the manifest is no JSON object")
    if set(data) == set(_ITEMS):
        leaves = {
            item: [Leaf(tuple(keys), dtype, tuple(shape)) for keys, dtype, shape in data[item]] for item in _ITEMS
        }
        return Manifest(0, **leaves, host=None, score=None)
    body = {key: value for key, value in data.items() if key != "checksum"}
    if data.get("checksum") != json_checksum(body):
        raise Damaged("the manifest does not have its checksum")
    if body["format"] > FORMAT:
        raise ConfigError(
            f"{folder}: saved by rlstable {body['rlstable']} in checkpoint format {body['format']}, of which rlstable "
            f"{__version__} knows nothing (it reads 0 to {FORMAT}); update rlstable to at least {body['rlstable']}"
        )
    leaves = {
        item: [Leaf(tuple(keys), dtype, tuple(shape), checksum) for keys, dtype, shape, checksum in body[item]]
        for item in _ITEMS
    }
    return Manifest(body["format"], **leaves, host=body["host"], score=body["score"])


def json_checksum(data: Any) -> int:
    """CRC-32 of JSON data, whatever the order of its members and the spaces between them."""
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
