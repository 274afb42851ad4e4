"""One process at a time in a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path

from rlstable.config import ConfigError

_NAME = ".lock"


class RunLock:
    """A run folder that is ours as long as the lock is held, which ends with the process at the latest.

    The kernel releases the lock of a process that dies in any way, so there are no stale ones: a file that was left
    behind by a dead process is free.

    Args:
        run_dir: A folder that exists.

    Attributes:
        unsupported: Why the file system cannot lock, None where it can; nothing is held then.

    Raises:
        ConfigError: Another run holds it; names the folder and the process.
        OSError: The folder cannot be written.
    """

    def __init__(self, run_dir: Path):
        self._path = run_dir.absolute() / _NAME
        self._file: int | None = None
        self.unsupported: str | None = None
        while self._file is None and self.unsupported is None:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = self._is_in_place(file)
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
                if ours:
                    self._file = file
                else:  # its last holder deleted it between our opening and locking it
                    os.close(file)
        if self._file is not None:
            _write(self._file)

    def release(self) -> None:
        """Gives the folder free; may be called again."""
        file, self._file = self._file, None
        if file is not None:
            if self._is_in_place(file):  # another folder under the same name is another run's
                # Deleted while it is held: a process that has it open sees that it is no longer in place.
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(file)

    def take_again(self) -> None:
        """Locks the folder that has the name now, in place of the deleted one; errors as for a new lock."""
        new, gone = RunLock(self._path.parent), self._file
        self._file, self.unsupported = new._file, new.unsupported
        if gone is not None:
            os.close(gone)

    @property
    def in_place(self) -> bool:
        """Whether the folder is still the one that is locked; True where the file system has no locks."""
        return self._file is None or self._is_in_place(self._file)

    def _is_in_place(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self._path))
        except OSError:
            return False


def _write(file: int) -> None:
    """Writes the holder into the lock file; on a full disk the file stays empty and the lock still holds."""
    holder = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, holder.encode(), 0)


def _read(file: int) -> str:
    try:
        holder = json.loads(os.pread(file, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
