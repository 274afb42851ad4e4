"""Manifest of a checkpoint: a JSON object with its format, arrays and host data, and a checksum of these."""

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

FORMAT = 3


class Damaged(Exception):
    """A checkpoint, or a part of it, is damaged. The message is one line."""


class Manifest(NamedTuple):
    """The manifest of one checkpoint."""

    state: list[Leaf]
    policy: list[Leaf]
    host: dict[str, Any]
    score: float | None


def to_json(
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


def from_json(data: Any, folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint's folder, whose name is its number.

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
