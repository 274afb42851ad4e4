"""Checks during training that the run folder still exists, and restores it if not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.run_folder import reserve_room, write_config, write_machine


class FolderCheck:
    """Checks during training that the files of a run folder exist, and restores missing ones.

    Args:
        run_dir: The run folder.
        lock: The lock of the folder.
        logbook: Writes metrics and events to the folder.
        settings: Content of `config.yaml`.
        machine: Content of `machine.json`; None to write none.
        event: Called as `event(kind, **fields)`.

    Attributes:
        taken: Whether another run uses a folder with the same name. This run then writes nothing there any more.
    """

    def __init__(
        self,
        run_dir: Path,
        lock: RunLock,
        logbook: Logbook,
        settings: Mapping[str, Any],
        machine: Mapping[str, Any] | None,
        event: Callable[..., None],
    ):
        # Absolute, because the user may change the working directory.
        self._run_dir = run_dir.absolute()
        self._logbook = logbook
        self._settings = settings
        self._machine = machine
        self._event = event
        self._lock = lock
        self.taken = False
        self._write()

    @property
    def whole(self) -> bool:
        """Whether no file is missing. An edited `config.yaml` is not missing."""
        return not self._missing()

    def ensure(self) -> bool:
        """Restores missing files, with the event `run_folder_restored`.

        Returns:
            Whether files were missing.

        Raises:
            OSError: The folder cannot be written.
            ConfigError: Another run uses or has used a folder with the same name.
        """
        missing = self._missing()
        if not missing:
            return False
        self._run_dir.mkdir(parents=True, exist_ok=True)
        if not self._lock.in_place:
            self._take_again()
        self._write()
        self._logbook.restore()
        self._event("run_folder_restored", folder=str(self._run_dir), missing=missing)
        return True

    def _take_again(self) -> None:
        try:
            if self._logbook.foreign:
                raise ConfigError(f"{self._run_dir}: another run has used a folder with this name")
            self._lock.take_again()
        except ConfigError:
            self.taken = True
            raise

    def _write(self) -> None:
        write_config(self._run_dir, self._settings)
        reserve_room(self._run_dir)
        if self._machine is not None:
            write_machine(self._run_dir, self._machine)

    def _missing(self) -> list[str]:
        exists = {
            "config.yaml": (self._run_dir / "config.yaml").is_file(),
            "the lock": self._lock.in_place,
            "metrics.jsonl or events.jsonl": self._logbook.in_place,
        }
        return [name for name, present in exists.items() if not present]
