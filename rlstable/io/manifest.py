"""Manifest of a checkpoint: format, arrays, and checksums of all data.

The manifest is one JSON object. From format 1 on, its member `checksum` covers all other members, so that rlstable can
distinguish a newer format from a damaged manifest. Format 0 has no checksums, and its score is in another file.
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
    """A checkpoint, or a part of it, is damaged. The message is one line."""


class Manifest(NamedTuple):
    """The manifest of one checkpoint.

    Attributes:
        format: Number of the format; 0 has no checksums.
        state: The arrays of the training state.
        policy: The arrays of the policy.
        host: Checksum of the host data; None in format 0.
        score: Score of the policy; None without a score, and in format 0.
    """

    format: int
    state: list[Leaf]
    policy: list[Leaf]
    host: int | None
    score: float | None


def to_json(state: list[Leaf], policy: list[Leaf], host: Mapping[str, Any], score: float | None) -> dict[str, Any]:
    """The manifest of a new checkpoint, as JSON data.

    Args:
        state: The arrays of the training state, with checksums.
        policy: The arrays of the policy, with checksums.
        host: The host data.
        score: Score of the policy; a finite number or None.
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
        folder: Folder of the checkpoint, for messages.

    Raises:
        Damaged: The manifest is damaged.
        ConfigError: This rlstable cannot read the format.
    """
    if not isinstance(data, dict):
        raise Damaged("the manifest is not a JSON object")
    if set(data) == set(_ITEMS):
        leaves = {
            item: [Leaf(tuple(keys), dtype, tuple(shape)) for keys, dtype, shape in data[item]] for item in _ITEMS
        }
        return Manifest(0, **leaves, host=None, score=None)
    body = {key: value for key, value in data.items() if key != "checksum"}
    if data.get("checksum") != json_checksum(body):
        raise Damaged("the checksum of the manifest is wrong")
    if body["format"] > FORMAT:
        raise ConfigError(
            f"{folder}: saved by rlstable {body['rlstable']} in checkpoint format {body['format']}, but rlstable "
            f"{__version__} reads only 0 to {FORMAT}; update rlstable to at least {body['rlstable']}"
        )
    leaves = {
        item: [Leaf(tuple(keys), dtype, tuple(shape), checksum) for keys, dtype, shape, checksum in body[item]]
        for item in _ITEMS
    }
    return Manifest(body["format"], **leaves, host=body["host"], score=body["score"])


def json_checksum(data: Any) -> int:
    """CRC-32 of JSON data, independent of spaces and of the order of members."""
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
