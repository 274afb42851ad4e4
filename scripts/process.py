"""Runs processes as a user starts them, measures their time and memory, and finds the rivals' interpreters."""

import contextlib
import dataclasses
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstable.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "scripts" / "rivals"
_POLL_SECONDS = 0.05
# With these variables a process would compile less than a user's process, or compile its modules again.
_NOT_PASSED_ON = re.compile("PYTHON(PATH|STARTUP|DONTWRITEBYTECODE)|JAX_COMPILATION_CACHE_DIR|JAX_PERSISTENT_.*")


@dataclasses.dataclass(frozen=True)
class Outcome:
    started: float  # time of the start, in seconds since the epoch, the clock of the process's own lines
    seconds: float  # wall time
    cpu: float  # CPU seconds; few beside `seconds` times the cores if other processes were running
    code: int | None  # exit code; None if the process reached its time limit
    peak_mb: float | None  # greatest memory in the host; None where the system does not report it
    output: str = ""  # everything that the process printed

    @property
    def last_line(self) -> str:
        return last_line(self.output)


def environment(**more: str) -> dict[str, str]:
    """Returns the user's environment variables without those that only concern this process."""
    return {name: value for name, value in os.environ.items() if not _NOT_PASSED_ON.fullmatch(name)} | more


def last_line(text: str) -> str:
    return next((line for line in reversed(text.split("\n")) if line.strip()), "")


def watch(command: Sequence[str], env: Mapping[str, str], limit: float = math.inf) -> Outcome:
    """Runs a process in the root of the checkout until the process ends or reaches its limit, in seconds."""
    peak, before = 0.0, _cpu_of_children()
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        started = time.time()
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while process.poll() is None and time.time() - started <= limit:
                peak = max(peak, _memory_mb(process.pid))
                time.sleep(_POLL_SECONDS)
            seconds, code = time.time() - started, process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        output = out.read()
    return Outcome(started, seconds, _cpu_of_children() - before, code, peak or None, output)


def run(module: str, *words: str, limit: float = math.inf) -> Outcome:
    """Runs a module of this checkout to its end; a ConfigError if the process fails."""
    done = watch([sys.executable, "-m", module, *words], environment(PYTHONPATH=str(ROOT)), limit)
    if done.code != 0:
        raise ConfigError(f"{' '.join((module, *words))}: exit code {done.code}, {done.last_line or 'no output'}")
    return done


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory_mb(pid: int) -> float:
    """Returns the peak of the host memory of a process; 0 where the system does not report it.

    `ru_maxrss` would include the memory of this process, which a new process inherits through `exec`.
    """
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def versions(rival: str) -> dict[str, str]:
    """Returns the versions of Python and of the pinned packages that a rival's interpreter has."""
    lines = (REQUIREMENTS / f"requirements-{rival}.txt").read_text().split()
    names = [line.split("==")[0] for line in lines]
    ask = (
        "import json, platform, sys; from importlib.metadata import version; "
        "print(json.dumps({'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    )
    return dict(json.loads(subprocess.check_output([python_of(rival), "-c", ask, *names], text=True)))


def python_of(rival: str) -> Path:
    """Returns the interpreter of a rival's virtual environment, which `make` makes."""
    python = ROOT / ".rivals" / rival / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"{rival} is not installed; say: make .rivals/{rival}/installed")
    return python
