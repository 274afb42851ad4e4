"""`metrics.jsonl` and `events.jsonl`: the record of a run that every report reads."""

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
    """`metrics.jsonl` and `events.jsonl`: strict JSON, one object a line, on disk as soon as a call returns.

    Numbers that are not finite are written as null. A key that is called like one of ours gets a trailing
    underscore. Files of long runs are thinned, see `thinning`.

    Args:
        run_dir: Folder of the run; made if missing.
        resume_step: Step from which a resumed run continues. Metrics of later steps are dropped, since training
            writes them again; events are kept, since they happened.
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
        """Whether both files are still those under their names."""
        return self._metrics.in_place and self._events.in_place

    @property
    def foreign(self) -> bool:
        """Whether another run has written a file with the name of one of these."""
        return self._metrics.foreign or self._events.foreign

    def restore(self) -> None:
        """Writes files again whose names are gone, with all their lines, and appends to the new files.

        Raises:
            OSError: They cannot be written.
        """
        self._metrics.restore()
        self._events.restore()

    def close(self) -> None:
        """Closes the files; may be called again."""
        self._metrics.close()
        self._events.close()


class _LineFile:
    """A file of JSON lines that is appended to; torn lines are dropped when it is opened, old ones thinned."""

    def __init__(self, path: Path, last_step: int | None, thin: Thin):
        self._path = path.absolute()
        self._thin = thin
        self._count = _trim(path, last_step) if path.exists() else 0
        self._kept = 0
        self._file = _open(self._path)
        self._swapping = threading.Lock()  # the file is replaced in the thread that writes it
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
        """Whether the file of that name is another one, which begins with another line; a copy does not."""
        if self.in_place:
            return False
        try:
            with self._path.open("rb") as other:
                theirs = other.readline()
            return bool(theirs) and theirs != self._first_line()
        except OSError:
            return False

    def restore(self) -> None:
        if self.in_place:
            return
        lost, part = self._file, _part_of(self._path)
        with part.open("wb") as target, contextlib.suppress(OSError):  # some network file systems forget such a file
            lost.seek(0)
            shutil.copyfileobj(lost, target)
        with self._swapping:
            os.replace(part, self._path)
            self._file = _open(self._path)
        lost.close()

    def append(self, head: dict[str, Any], fields: Mapping[str, Any]) -> None:
        """Writes one line: `head` and then `fields`."""
        body = {f"{key}_" if key in head else str(key): to_json(value) for key, value in fields.items()}
        line = json.dumps({**head, **body}, allow_nan=False).encode() + b"\n"
        # After a full disk half a line may be there; the next row starts a new line.
        line = b"\n" + line if self._torn else line
        self._torn = True
        if self._file.write(line) != len(line):
            raise OSError("the line was written in part only; is the disk full?")
        self._torn = False
        self._count += 1
        if thinning.due(self._count, self._kept):
            self._rewrite()

    def close(self) -> None:
        self._file.close()

    def _rewrite(self) -> None:
        """Puts a thinned file in the place of this one; killed in between, the file is the old or the new one, whole.

        Without room on the disk nothing changes; `_kept` puts off the next try.
        """
        self._kept, part = self._count, _part_of(self._path)
        if not self.in_place:
            return  # the lines under that name are not these
        with contextlib.ExitStack() as failing:
            try:
                part.unlink(missing_ok=True)
                file = failing.enter_context(_open(part))
                kept = 0
                for row in self._thin(self._rows):
                    line = json.dumps(row, allow_nan=False).encode() + b"\n"
                    if file.write(line) != len(line):
                        raise OSError("the disk is full")
                    kept += 1
                os.fsync(file.fileno())
                with self._swapping:
                    os.replace(part, self._path)
                    old, self._file = self._file, file  # what was `part` is appended to from now on
            except (OSError, ValueError):
                with contextlib.suppress(OSError):
                    part.unlink()
                return
            failing.pop_all()
        old.close()
        self._count = self._kept = kept

    def _first_line(self) -> bytes:
        with open(os.dup(self._file.fileno()), "rb") as own:
            own.seek(0)
            return own.readline()

    def _rows(self) -> Iterator[thinning.Entry]:
        """Every line that is not torn."""
        with self._path.open("rb") as source:
            yield from (row for line in source if (row := _parsed(line)) is not None)


def _open(path: Path) -> io.FileIO:
    """A file that every write is appended to at once, and that can be read where its name is gone."""
    return path.open("ab+", buffering=0)


def _part_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The object of a line, None for a line that is torn."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int | float) else None


def _trim(path: Path, last_step: int | None) -> int:
    """Rewrites a file of JSON lines without torn lines and without steps after `last_step`; returns what is left."""
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
