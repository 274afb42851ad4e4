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

    Attributes:
        unsupported: Why the file system cannot lock; None if it can. Without support, no lock is held.

    Raises:
        ConfigError: Another run holds the lock; names the folder and the process.
        OSError: The folder cannot be written.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir.absolute() / ".lock"
        self._file: int | None = None
        self.unsupported: str | None = None
        while self._file is None and self.unsupported is None:
            file = open_file(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                valid = self._is_in_place(file)
            except BlockingIOError as error:
                holder = _read(file)
                os.close(file)
                raise ConfigError(
                    f"hydra.run.dir: {run_dir} is in use by {holder}; wait until that run has ended, stop it, or "
                    "choose another folder"
                ) from error
            except OSError as error:  # some network file systems have no locks
                os.close(file)
                self._path.unlink(missing_ok=True)
                self.unsupported = error.strerror or str(error)
            else:
                if valid:
                    self._file = file
                else:  # the previous holder deleted the file before this process locked it
                    os.close(file)
        if self._file is not None:
            _write(self._file)

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            if self._is_in_place(file):  # otherwise another run owns the folder under this name
                # Deleted while locked, so that a process that has opened the file notices the deletion.
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(file)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except OSError:
            return False


def _write(file: int) -> None:
    """Writes the holder to the lock file. On a full disk the file stays empty, but the lock still holds."""
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(), 0)


def _read(file: int) -> str:
    try:
        holder = parse_json(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
