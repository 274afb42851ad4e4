"""Packs facts and arrays into two files, JSON and an npz without pickle, each with a checksum."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable import __version__
from rlstable.config import ConfigError
from rlstable.io.manifest import json_checksum


def pack(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[str, bytes]:
    """The contents of the two files: facts as JSON with both checksums, and the arrays as an npz."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    body = _plain({**facts, "arrays": zlib.crc32(packed.getbuffer())})
    return json.dumps({**body, "checksum": json_checksum(body)}, indent=2, allow_nan=False), packed.getvalue()


def unpack(facts: Path, arrays: Path, newest: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the two files of `pack`.

    Args:
        facts: The JSON file.
        arrays: The npz file.
        newest: The newest format that this version of rlstable knows.

    Raises:
        ConfigError: A file is damaged, or of a newer format.
        FileNotFoundError: A file is missing.
    """
    folder = facts.parent
    try:
        data = json.loads(facts.read_text())
        body = {name: value for name, value in data.items() if name != "checksum"}
        if data.get("checksum") != json_checksum(body):
            raise ValueError(f"{facts.name} does not have its checksum")
        if body["format"] > newest:
            raise ConfigError(
                f"{folder}: of incident format {body['format']}, which rlstable {__version__} does not know; "
                f"update rlstable to {body['versions']['rlstable']}"
            )
        packed = arrays.read_bytes()
        if zlib.crc32(packed) != body["arrays"]:
            raise ValueError(f"{arrays.name} does not have its checksum")
        with np.load(io.BytesIO(packed), allow_pickle=False) as found:
            return body, dict(found)
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ConfigError(f"{folder}: is torn or was edited ({error}); it cannot be trusted") from error


def _plain(value: Any) -> Any:
    """Data for JSON, which has no NaN and no infinity: both become text, `nan`, `inf` or `-inf`."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
