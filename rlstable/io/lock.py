"""Lock of a run folder: only one process may use it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.io.files import open_file, parse_json


class RunLock:
    """Exclusive lock of an existing run folder, held until `release` or until the process ends.

    On a file system without locks, as some network file systems, no lock is held. Raises a `ConfigError` that names the
    folder and the process if another run holds the lock, and `OSError` if the folder cannot be written.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir.absolute() / ".lock"
        file = open_file(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = not self._is_in_place(file)  # the previous holder has just deleted the file
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
        if taken:
            holder = _read(file)
            os.close(file)
            raise ConfigError(
                f"hydra.run.dir: {run_dir} is in use by {holder}; wait until that run has ended, stop it, or "
                "choose another folder"
            )
        self._file: int | None = file
        self._folder = os.open(run_dir, os.O_RDONLY)  # as long as it is open, no other folder gets its number
        with contextlib.suppress(OSError):  # on a full disk the file stays empty, but the lock still holds
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)

    @property
    def in_place(self) -> bool:
        """Whether the run folder was not deleted, moved or replaced, as long as the lock was held."""
        if self._file is None:
            return self._was_in_place
        try:
            return os.path.samestat(os.fstat(self._folder), os.stat(self._path.parent))
        except OSError:
            return False

    def release(self) -> None:
        self._was_in_place = self.in_place
        file, self._file = self._file, None
        if file is not None:
            if self._is_in_place(file):  # otherwise another run owns the folder under this name
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(file)
            os.close(self._folder)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except OSError:
            return False


def _read(file: int) -> str:
    try:
        holder = parse_json(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
