"""Arrays on disk beside what is known of them: two files, JSON and an npz without pickle, each with its checksum."""

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


def sealed(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> tuple[str, bytes]:
    """Facts as JSON with their checksum and that of the arrays, and the arrays as an npz without pickle."""
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    body = _plain({**facts, "arrays": zlib.crc32(packed.getbuffer())})
    return json.dumps({**body, "checksum": json_checksum(body)}, indent=2, allow_nan=False), packed.getvalue()


def unsealed(facts: Path, arrays: Path, newest: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Reads what `sealed` made.

    Args:
        facts: The file of the one.
        arrays: The file of the other.
        newest: The format that this rlstable knows.

    Raises:
        ConfigError: It is not what was written, or it is of a newer format.
        FileNotFoundError: There is none.
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
    """JSON has no word for what is not finite; it is written as text, `nan`, `inf` or `-inf`."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
