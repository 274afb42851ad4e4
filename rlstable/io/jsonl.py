"""Writes `metrics.jsonl` and `events.jsonl`, which all reports read."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.io import thinning

Thin = Callable[[thinning.Read], Iterator[thinning.Entry]]


class JsonLines:
    """Writes `metrics.jsonl` and `events.jsonl`: strict JSON, one object per line, written when a call returns.

    Numbers that are not finite become null. A field named `step`, `time` or `kind` gets a trailing underscore. Files of
    long runs are thinned (`thinning`).

    Args:
        run_dir: Folder of the run; created if missing.
        resume_step: Step from which a resumed run continues. Metrics of later steps are dropped, because training
            writes them again. Events are kept.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None):
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = _LineFile(folder / "metrics.jsonl", resume_step, thinning.thinned_rows)
        self._events = _LineFile(folder / "events.jsonl", None, thinning.thinned_events)

    def log(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        """Appends one line to metrics.jsonl."""
        self._metrics.append({"step": int(step), "time": time.time()}, metrics)

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Appends one line to events.jsonl."""
        self._events.append({"step": int(step), "time": time.time(), "kind": kind}, fields)

    @property
    def in_place(self) -> bool:
        """Whether both open files still exist under their names."""
        return self._metrics.in_place and self._events.in_place

    @property
    def foreign(self) -> bool:
        """Whether another run has replaced one of the files."""
        return self._metrics.foreign or self._events.foreign

    def restore(self) -> None:
        """Writes deleted files again with all their lines, and appends to the new files.

        Raises:
            OSError: A file cannot be written.
        """
        self._metrics.restore()
        self._events.restore()

    def close(self) -> None:
        """Closes the files; may be called again."""
        self._metrics.close()
        self._events.close()


class _LineFile:
    """An append-only file of JSON lines. Opening drops incomplete lines; old lines are thinned."""

    def __init__(self, path: Path, last_step: int | None, thin: Thin):
        self._path = path.absolute()
        self._thin = thin
        self._count = _trim(path, last_step) if path.exists() else 0
        self._thinned_count = 0
        self._file = _open(self._path)
        self._swapping = threading.Lock()  # the writing thread replaces the file
        self._torn = False

    @property
    def in_place(self) -> bool:
        with self._swapping:
            try:
                return os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path))
            except OSError:
                return False

    @property
    def foreign(self) -> bool:
        """Whether another run wrote the file under this name: its first line differs. A copy is not foreign."""
        if self.in_place:
            return False
        try:
            with self._path.open("rb") as current:
                first_line = current.readline()
            return bool(first_line) and first_line != self._first_line()
        except OSError:
            return False

    def restore(self) -> None:
        if self.in_place:
            return
        deleted, part = self._file, _part_of(self._path)
        with part.open("wb") as target, contextlib.suppress(OSError):  # some network file systems lose deleted files
            deleted.seek(0)
            shutil.copyfileobj(deleted, target)
        with self._swapping:
            os.replace(part, self._path)
            self._file = _open(self._path)
        deleted.close()

    def append(self, head: dict[str, Any], fields: Mapping[str, Any]) -> None:
        """Appends one line: `head`, then `fields`."""
        body = {f"{key}_" if key in head else str(key): to_json(value) for key, value in fields.items()}
        line = json.dumps({**head, **body}, allow_nan=False).encode() + b"\n"
        # A full disk may have cut the last line, so this line starts on a new one.
        line = b"\n" + line if self._torn else line
        self._torn = True
        if self._file.write(line) != len(line):
            raise OSError("only a part of the line was written; the disk may be full")
        self._torn = False
        self._count += 1
        if thinning.due(self._count, self._thinned_count):
            self._rewrite()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        """Replaces the file by a thinned one, atomically.

        On a full disk nothing changes, and `_thinned_count` delays the next attempt.
        """
        self._thinned_count, part = self._count, _part_of(self._path)
        if not self.in_place:
            return  # another file has this name
        with contextlib.ExitStack() as on_failure:
            try:
                part.unlink(missing_ok=True)
                file = on_failure.enter_context(_open(part))
                count = 0
                for row in self._thin(self._rows):
                    line = json.dumps(row, allow_nan=False).encode() + b"\n"
                    if file.write(line) != len(line):
                        raise OSError("the disk is full")
                    count += 1
                os.fsync(file.fileno())
                with self._swapping:
                    os.replace(part, self._path)
                    old, self._file = self._file, file
            except (OSError, ValueError):
                with contextlib.suppress(OSError):
                    part.unlink()
                return
            on_failure.pop_all()
        old.close()
        self._count = self._thinned_count = count

    def _first_line(self) -> bytes:
        with open(os.dup(self._file.fileno()), "rb") as copy:
            copy.seek(0)
            return copy.readline()

    def _rows(self) -> Iterator[thinning.Entry]:
        """Every complete line."""
        with self._path.open("rb") as source:
            yield from (row for line in source if (row := _parsed(line)) is not None)


def _open(path: Path) -> io.FileIO:
    """Opens a file for unbuffered appending. It can be read even after its name is deleted."""
    return path.open("ab+", buffering=0)


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line; None for an incomplete line."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int | float) else None


def _trim(path: Path, last_step: int | None) -> int:
    """Drops incomplete lines and steps after `last_step` from a file. Returns the number of lines that are left."""
    part = _part_of(path)
    kept = dropped = 0
    with path.open("rb") as source, part.open("wb") as target:
        for line in source:
            row = _parsed(line)
            keep = line.endswith(b"\n") and row is not None and (last_step is None or row["step"] <= last_step)
            kept, dropped = kept + keep, dropped + (not keep)
            target.write(line if keep else b"")
        target.flush()
        os.fsync(target.fileno())
    if dropped:
        os.replace(part, path)
    else:
        part.unlink()
    return kept


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
