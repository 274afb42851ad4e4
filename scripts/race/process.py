"""A process as a user starts it, watched from outside: how long it ran, what memory it held at its most."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlstable.config import ConfigError

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "scripts" / "rivals"
_LOOK_EVERY = 0.05
# What would have a process compile less, or its modules more, than a user's.
_NOT_PASSED_ON = re.compile("PYTHON(PATH|STARTUP|DONTWRITEBYTECODE)|JAX_COMPILATION_CACHE_DIR|JAX_PERSISTENT_.*")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a process.

    Attributes:
        started: When it was started, in seconds since the epoch: the clock that its own lines are in.
        seconds: How long it ran.
        cpu: Seconds of processors that it took; few beside `seconds` times the cores where others were in the way.
        code: Its exit code, None where it ran out of time.
        peak_mb: The most memory it had at once in the host, None where the system does not tell.
        last_line: Of what it printed.
    """

    started: float
    seconds: float
    cpu: float
    code: int | None
    peak_mb: float | None
    last_line: str


def environment(**more: str) -> dict[str, str]:
    """The environment of every side: the user's, without what this process alone was told."""
    return {name: value for name, value in os.environ.items() if not _NOT_PASSED_ON.fullmatch(name)} | more


def watch(command: Sequence[str], env: Mapping[str, str], folder: Path, limit: float) -> Outcome:
    """Runs a process to its end or to its limit, in the root of the checkout.

    Args:
        command: What is started.
        env: Its environment.
        folder: Where what it prints is kept.
        limit: Seconds after which it is killed.
    """
    log, peak, before = folder / "output.txt", 0.0, _cpu_of_children()
    with log.open("w") as out:
        started = time.time()
        process = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            while process.poll() is None and time.time() - started <= limit:
                peak = max(peak, memory_mb(process.pid))
                time.sleep(_LOOK_EVERY)
            seconds, code = time.time() - started, process.poll()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "")
    return Outcome(started, seconds, _cpu_of_children() - before, code, peak or None, last)


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_mb(pid: int | str, what: str = "VmHWM") -> float:
    """Memory of a process in the host, by default the most it ever had; 0 where the system does not tell.

    Args:
        pid: The process, `self` for this one.
        what: `VmHWM` or `VmRSS`, what it has now.
    """
    with contextlib.suppress(OSError):
        found = re.search(rf"{what}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def pins(name: str) -> dict[str, str]:
    """The versions that a rival is compared in."""
    lines = (REQUIREMENTS / f"requirements-{name}.txt").read_text().split()
    return dict(line.split("==") for line in lines)


def python_of(name: str, venvs: Path, gpu: bool) -> Path:
    """The interpreter of a rival's own virtual environment, which is made where it is not there.

    Args:
        name: Of the rival.
        venvs: The folder of all environments.
        gpu: Whether its jax is to find a GPU.

    Raises:
        ConfigError: It cannot be made.
    """
    wanted = [f"jax[cuda12]=={v}" if gpu and n == "jax" else f"{n}=={v}" for n, v in pins(name).items()]
    digest = hashlib.blake2s("\n".join([sys.version, *wanted]).encode()).hexdigest()
    folder = venvs.absolute() / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not (stamp.exists() and stamp.read_text() == digest):
        print(f"race: installing {name} into {folder}, some minutes", file=sys.stderr, flush=True)
        _install([sys.executable, "-m", "venv", "--clear", str(folder)], name)
        _install([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], name)
        stamp.write_text(digest)
    return python


def _install(command: Sequence[str], name: str) -> None:
    try:
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--venvs: cannot make the environment of {name}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing was said"]
        raise ConfigError(f"--venvs: cannot make the environment of {name}: {said[-1]}")
