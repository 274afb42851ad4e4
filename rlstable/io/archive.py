"""Stores facts and arrays in two files, JSON and an npz without pickle, both with checksums."""

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
from rlstable.io.files import read, read_json
from rlstable.io.manifest import json_checksum


def pack(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[str, bytes]:
    """The contents of the two files: the facts as JSON with both checksums, and the arrays as npz."""
    npz = io.BytesIO()
    np.savez_compressed(npz, **arrays)  # type: ignore[arg-type]
    body = _nonfinite_as_text({**facts, "arrays": zlib.crc32(npz.getbuffer())})
    return json.dumps({**body, "checksum": json_checksum(body)}, indent=2, allow_nan=False), npz.getvalue()


def unpack(facts: Path, arrays: Path, version: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads the two files that `pack` made.

    Raises:
        ConfigError: A file is damaged, or has another format.
        FileNotFoundError: A file is missing.
    """
    folder = facts.parent
    try:
        data = read_json(facts)
        body = {name: value for name, value in data.items() if name != "checksum"}
        if data.get("checksum") != json_checksum(body):
            raise ValueError(f"the checksum of {facts.name} is wrong")
        if body["format"] != version:
            raise ConfigError(
                f"{folder}: has incident format {body['format']}, which rlstable {__version__} cannot read; "
                f"use rlstable {body['versions']['rlstable']}"
            )
        npz = read(arrays)
        if zlib.crc32(npz) != body["arrays"]:
            raise ValueError(f"the checksum of {arrays.name} is wrong")
        with np.load(io.BytesIO(npz), allow_pickle=False) as loaded:
            return body, dict(loaded)
    except (FileNotFoundError, ConfigError):
        raise
    except (OSError, KeyError, TypeError, AttributeError, UnicodeDecodeError, MemoryError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{folder}: cannot be read ({type(error).__name__}: {error})") from error
    except ValueError as error:
        raise ConfigError(f"{folder}: is damaged or was edited ({error}); use another copy") from error


def _nonfinite_as_text(value: Any) -> Any:
    """Converts NaN and infinities, which JSON does not have, to the text `nan`, `inf` or `-inf`."""
    if isinstance(value, dict):
        return {name: _nonfinite_as_text(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nonfinite_as_text(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
