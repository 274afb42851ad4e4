"""Manifest of a checkpoint: format, arrays, and checksums of all data.

The manifest is one JSON object. Its member `checksum` covers all other members, so that another format is not taken
for damage.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstable import __version__
from rlstable.config import ConfigError
from rlstable.io.arrays import Leaf

FORMAT = 2


class Damaged(Exception):
    """A checkpoint, or a part of it, is damaged. The message is one line."""


class Manifest(NamedTuple):
    """The manifest of one checkpoint: its number, its arrays, the checksum of its host data, and its score."""

    iteration: int
    state: list[Leaf]
    policy: list[Leaf]
    host: int
    score: float | None


def to_json(
    iteration: int, state: list[Leaf], policy: list[Leaf], host: Mapping[str, Any], score: float | None
) -> dict[str, Any]:
    """The manifest of a new checkpoint as JSON data; `score` is finite or None."""
    body = {
        "format": FORMAT,
        "rlstable": __version__,
        "iteration": iteration,
        "state": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in state],
        "policy": [[list(leaf.keys), leaf.dtype, list(leaf.shape), leaf.checksum] for leaf in policy],
        "host": json_checksum(host),
        "score": score,
    }
    return {**body, "checksum": json_checksum(body)}


def from_json(data: Any, folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint's folder, whose name is the iteration.

    Raises:
        Damaged: The manifest is damaged.
        ConfigError: It has another format.
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
    if body["iteration"] != int(folder.name):
        raise Damaged(f"it is checkpoint {body['iteration']} under another number")
    score = body["score"]
    if score is not None and not (isinstance(score, float | int) and math.isfinite(score)):
        raise Damaged("the score is not a number")
    leaves = {
        item: [Leaf(tuple(keys), dtype, tuple(shape), checksum) for keys, dtype, shape, checksum in body[item]]
        for item in ("state", "policy")
    }
    return Manifest(body["iteration"], **leaves, host=body["host"], score=score)


def json_checksum(data: Any) -> int:
    """CRC-32 of JSON data, independent of spaces and of the order of members."""
    return zlib.crc32(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())
