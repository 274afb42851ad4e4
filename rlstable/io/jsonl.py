"""Writes `metrics.jsonl` and `events.jsonl`, which all reports read."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.io.files import open_file, parse_json


class JsonLines:
    """Writes `metrics.jsonl` and `events.jsonl`: strict JSON, one object per line, written when a call returns.

    Lines are only appended. Numbers that are not finite become null. A field named `step`, `time` or `kind` gets a
    trailing underscore. A resume cuts off the metrics after `resume_step`, because training writes them again; events
    are kept.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None):
        folder = Path(run_dir)
        self._metrics = _LineFile(folder / "metrics.jsonl", resume_step)
        self._events = _LineFile(folder / "events.jsonl", None)

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self._metrics.append({"step": int(step), "time": time.time()}, metrics)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        self._events.append({"step": int(step), "time": time.time(), "kind": kind}, fields)

    def close(self) -> None:
        self._metrics.close()
        self._events.close()


class _LineFile:
    """An append-only file of JSON lines. Opening cuts off an incomplete last line and lines after `last_step`."""

    def __init__(self, path: Path, last_step: int | None):
        self._file = os.fdopen(open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab+", buffering=0)
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as lines:
            kept = 0
            for line in lines:
                if not line.endswith(b"\n") or (last_step is not None and _step(line) > last_step):
                    break
                kept += len(line)
        self._file.truncate(kept)

    def append(self, head: dict[str, Any], fields: Mapping[str, Any]) -> None:
        """Appends one line, `head` and then `fields`, or nothing if the disk is full."""
        body = {f"{key}_" if key in head else str(key): to_json(value) for key, value in fields.items()}
        line = json.dumps({**head, **body}, allow_nan=False).encode() + b"\n"
        end = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("only a part of the line was written; free space on the disk")
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


def _step(line: bytes) -> float:
    """The step of a line; minus infinity for a damaged line."""
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        return -math.inf
    return step if isinstance(step, int | float) else -math.inf


def to_json(value: Any) -> Any:
    """The value as strict JSON: non-finite numbers become null, arrays become lists, unknown types become text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__array__"):
        plain = np.asarray(value).tolist()
        return to_json(plain) if isinstance(plain, list | int | float) else str(plain)
    return str(value)
