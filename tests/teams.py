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
    """Processes on this machine; one process is an ordinary run. Process `i` prints to `<run_dir>.<i>.log`."""

    def __init__(
        self,
        run_dir: Path,
        args: Sequence[str] = (),
        processes: int = 2,
        devices: int = 2,  # of each process
        moments: dict[int, dict[str, Any]] | None = None,  # of `deadly.py`, by number of the process
        own_args: dict[int, list[str]] | None = None,  # by number of the process
        own_paths: dict[int, Path] | None = None,  # folders of modules, by number of the process
    ):
        self.seconds_after_first_end = 0.0  # from the first to the last end of a process
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
        """The exit codes of the processes, killed after `patience` seconds; a negative number is a signal."""
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
