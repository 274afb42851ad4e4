"""Checks that the run folder is still in place, and writes it again if it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from rlstable.io.lock import RunLock
from rlstable.io.logbook import Logbook
from rlstable.io.run_folder import reserve_room, write_config, write_machine


class FolderCheck:
    """Checks that the files of a run folder are in place while the run is training, and writes missing ones again.

    Args:
        run_dir: The folder.
        lock: Held on it.
        logbook: What writes metrics and events there.
        settings: Content of `config.yaml`.
        machine: Content of `machine.json`, None where there is none.
        event: Called as `event(kind, **fields)`.

    Attributes:
        taken: Whether another run was found in a folder of that name; this run then writes nothing there any more.
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
        # The user may change the working folder.
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
        """Whether nothing is missing; a `config.yaml` that was edited since is in place."""
        return not self._missing()

    def ensure(self) -> bool:
        """Writes the folder again if files of it are missing, which is the event `run_folder_restored`.

        Returns:
            Whether it did.

        Raises:
            OSError: The folder cannot be written.
            ConfigError: Another run is, or was, in a folder of that name.
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
                raise ConfigError(f"{self._run_dir}: another run has used a folder of that name")
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
        places = {
            "config.yaml": (self._run_dir / "config.yaml").is_file(),
            "the lock": self._lock.in_place,
            "metrics.jsonl or events.jsonl": self._logbook.in_place,
        }
        return [name for name, there in places.items() if not there]
