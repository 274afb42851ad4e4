"""`metrics.jsonl` and `events.jsonl`: the record of a run that every report reads."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class JsonLines:
    """`metrics.jsonl` and `events.jsonl`: strict JSON, one object a line, on disk as soon as a call returns.

    Numbers that are not finite are written as null. A key that is called like one of ours gets a trailing
    underscore.

    Args:
        run_dir: Folder of the run; made if missing.
        resume_step: On a resume the step that training goes on from. Metrics of later steps are dropped,
            since they will be written again; events are kept, since they happened.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None):
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _LineFile(folder / "metrics.jsonl", resume_step)
        self._events = _LineFile(folder / "events.jsonl", None)

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Appends one line to metrics.jsonl."""
        self._metrics.append({"step": int(step), "time": time.time()}, metrics)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Appends one line to events.jsonl."""
        self._events.append({"step": int(step), "time": time.time(), "kind": kind}, fields)

    def close(self) -> None:
        """Closes the files; may be called again."""
        self._metrics.close()
        self._events.close()


class _LineFile:
    """A file of JSON lines that is appended to; torn lines are dropped when it is opened."""

    def __init__(self, path: Path, last_step: int | None):
        if path.exists():
            _trim(path, last_step)
        self._file = path.open("ab", buffering=0)
        self._torn = False

    def append(self, head: dict[str, Any], fields: Mapping[str, Any]) -> None:
        """Writes one line: `head` and then `fields`."""
        body = {f"{key}_" if key in head else str(key): to_json(value) for key, value in fields.items()}
        line = json.dumps({**head, **body}, allow_nan=False).encode() + b"\n"
        # After a full disk half a line may stand there; the next one begins afresh.
        line = b"\n" + line if self._torn else line
        self._torn = True
        if self._file.write(line) != len(line):
            raise OSError("the line was written in part only; is the disk full?")
        self._torn = False

    def close(self) -> None:
        self._file.close()


def _trim(path: Path, last_step: int | None) -> None:
    """Rewrites a file of JSON lines without torn lines and without steps after `last_step`."""
    part = path.with_name(f".{path.name}.part")
    dropped = 0
    with path.open("rb") as source, part.open("wb") as target:
        for line in source:
            try:
                step = json.loads(line)["step"]
                keep = line.endswith(b"\n") and (last_step is None or step <= last_step)
            except (ValueError, KeyError, TypeError):
                keep = False
            dropped += not keep
            target.write(line if keep else b"")
        target.flush()
        os.fsync(target.fileno())
    if dropped:
        os.replace(part, path)
    else:
        part.unlink()


def to_json(value: Any) -> Any:
    """The value as strict JSON: not finite becomes null, arrays become lists, the unknown becomes text."""
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
