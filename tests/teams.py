"""Starts several processes that train one run together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadly import ROOT, TINY
from quick_compile import environment as quick_environment

# Longest time of a start and a short run; a test that hangs fails.
_PATIENCE = 240.0
_NO_CLUSTER = ("SLURM_", "OMPI_", "JAX_COORDINATOR", "KUBERNETES_")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def without_cluster() -> dict[str, str]:
    """The environment variables without those by which JAX detects a cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NO_CLUSTER)}


class Team:
    """Processes on this machine.

    Args:
        run_dir: The run folder; the output of process `i` is the file `<run_dir>.<i>.log`.
        args: Arguments of the command.
        processes: Number of processes; 1 starts an ordinary run.
        devices: CPU devices of each process.
        moments: Moment of `deadly.py` of some processes, by their number.
        own_args: Arguments of single processes, by their number.
        own_paths: Folders of modules of single processes, by their number.

    Attributes:
        seconds_after_first_end: Seconds from the first to the last end of a process.
    """

    def __init__(
        self,
        run_dir: Path,
        args: Sequence[str] = (),
        processes: int = 2,
        devices: int = 2,
        moments: dict[int, dict[str, Any]] | None = None,
        own_args: dict[int, list[str]] | None = None,
        own_paths: dict[int, Path] | None = None,
    ):
        self.seconds_after_first_end = 0.0
        address = f"localhost:{free_port()}"
        environment = (
            without_cluster() | quick_environment() | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
        )
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
        self.logs = [run_dir.with_name(f"{run_dir.name}.{i}.log") for i in range(processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            moment = json.dumps((moments or {}).get(i, {"at": "end"}))
            team = [
                f"distributed.coordinator={address}", f"distributed.process_id={i}",
                f"distributed.num_processes={processes}",
            ] * (processes > 1)  # fmt: skip
            own_path = {"PYTHONPATH": f"{(own_paths or {}).get(i, '')}:{environment['PYTHONPATH']}"}
            with log.open("w") as output:
                self.processes.append(
                    subprocess.Popen(
                        [
                            sys.executable, str(ROOT / "tests" / "deadly.py"), moment, *TINY, "total_steps=320",
                            "eval.num_evals=2", *team, *args, *(own_args or {}).get(i, []), f"hydra.run.dir={run_dir}",
                        ],
                        env=environment | own_path, stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def ends(self, patience: float = _PATIENCE) -> list[int]:
        """The exit codes of the processes; a negative number is a signal.

        Args:
            patience: Seconds after which the processes are killed.
        """
        deadline, first = time.monotonic() + patience, None
        try:
            while any(running := [process.poll() is None for process in self.processes]):
                if first is None and not all(running):
                    first = time.monotonic()
                assert time.monotonic() < deadline, "\n".join(self.texts())
                time.sleep(0.1)
            self.seconds_after_first_end = 0.0 if first is None else time.monotonic() - first
            return [int(process.returncode) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()

    def texts(self) -> list[str]:
        """The printed text of each process."""
        return [log.read_text() for log in self.logs]
