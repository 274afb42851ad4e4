"""`python -m rlstable.train` that kills itself at a set moment: `python tests/deadly.py <moment as JSON> <arguments>`.

The process sends SIGKILL to itself, so the moment is exact:

- `{"at": "iteration", "n": 3}`: after the third iteration;
- `{"at": "evaluation", "n": 1}`: after the episodes of the first evaluation;
- `{"at": "compile", "what": "training", "seconds": 0.1}`: 0.1 s after the start of that compilation;
- `{"at": "write", "n": 2, "step": 5}`: before the fifth file operation of Python in the second save of a checkpoint;
- `{"at": "rollback", "n": 1, "step": 5}`: the same in the save after the first rollback; step 0 is before the save;
- `{"at": "end"}`: never.

With `"how": "SIGTERM"` the process sends itself this signal instead, with `"how": "error"` or `"memory"` it raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from commands import ROOT, SMALLEST
from quick_compile import environment as quick_environment

from rlstable import train
from rlstable.policy import evaluator
from rlstable.runner import after_iteration, loop, saving, setup, stopping

TINY = [
    *SMALLEST, "env.reset_pool_size=8", "resume=auto", "eval.num_evals=12", "checkpoint.every=2", "checkpoint.keep=100",
    "logging.console=off",
]  # fmt: skip
Moment = dict[str, Any]

_TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir", "os.listdir")


def start(run_dir: Path, args: Sequence[str], moment: Moment | None = None) -> subprocess.Popen[str]:
    """Starts the command in another process; without a moment it is not killed."""
    devices = next((arg.split("=")[1] for arg in args if arg.startswith("devices=")), "1")
    environment = os.environ | quick_environment()
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(moment or {"at": "end"}), *TINY, *args, f"hydra.run.dir={run_dir}"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def fail() -> None:
    raise RuntimeError("a fault on purpose")


def run_out_of_memory() -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a fault on purpose")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


HOW = {"SIGKILL": die, "SIGTERM": terminate, "error": fail, "memory": run_out_of_memory}


def counted(call: Callable[..., Any], n: int, before: bool, then: Callable[[], None]) -> Callable[..., Any]:
    """The function, with `then` called before or after its n-th call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == n:
            then()
        result = call(*args, **kwargs)
        if not before and calls == n:
            then()
        return result

    return wrapped


def die_at_file(step: int) -> None:
    """Dies before the `step`-th file operation under `checkpoints`, counted from now."""
    if step == 0:
        die()
    left = step

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in _TOUCHES and "/checkpoints" in str(args[0]):
            left -= 1
            if left == 0:
                die()

    sys.addaudithook(hook)


def alone(save: Callable[..., Any]) -> Callable[..., Any]:
    """Waits for the previous save, whose file operations would be counted otherwise."""

    def wrapped(self: saving.Saving, *args: Any) -> Any:
        self.checkpoints.wait()
        return save(self, *args)

    return wrapped


def plant(moment: Moment) -> None:
    at, then = moment["at"], HOW[moment.get("how", "SIGKILL")]
    if at == "iteration" and then is run_out_of_memory:
        setup.Program.each = counted(setup.Program.each, moment["n"], True, then)
    elif at == "iteration":
        loop.record_iteration = counted(loop.record_iteration, moment["n"], False, then)
    elif at == "evaluation":
        evaluator.summarize = counted(evaluator.summarize, moment["n"], True, die)
    elif at == "write":
        saving.Saving.save = alone(counted(saving.Saving.save, moment["n"], True, lambda: die_at_file(moment["step"])))
    elif at == "rollback":
        save = saving.Saving.save

        def next_save() -> None:
            saving.Saving.save = alone(counted(save, 1, True, lambda: die_at_file(moment["step"])))

        after_iteration._restored = counted(after_iteration._restored, moment["n"], True, next_save)
    elif at == "compile" and moment["what"] == "evaluation":
        # The program may be compiled in another thread and ready before the run asks for it.
        timer = threading.Timer(moment["seconds"], then)
        evaluator.Evaluator._begin = counted(evaluator.Evaluator._begin, 1, True, timer.start)
    elif at == "compile":
        compiling = stopping.StopRequest.compiling

        @contextlib.contextmanager
        def timed(self: Any, name: str) -> Iterator[None]:
            if name == moment["what"]:
                threading.Timer(moment["seconds"], then).start()
            with compiling(self, name):
                yield

        stopping.StopRequest.compiling = timed
    elif at != "end":
        raise ValueError(f"no such moment: {at}")


if __name__ == "__main__":
    plant(json.loads(sys.argv.pop(1)))
    train.main()
