"""What an iteration is made of on its device: which kernels run, how often and for how long, by a profile of one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from race_page import Section

from rlstable.compose import compose
from rlstable.config import Config

Row = dict[str, Any]
NAME = "kernels"
# The published hyperparameters, whose loop over minibatches is what counts on an accelerator, and something small.
TASKS = {
    "fast": ("env=fast",),
    "ant": ("env=ant", "ppo=ant", "env.backend=mjx"),
    "humanoid": ("env=humanoid", "ppo=humanoid", "env.backend=mjx"),
}
COMMON = ("seed=0", "devices=1")
PARTS = {task: (*own, *COMMON) for task, own in TASKS.items()}
WARM_UP = 3
DEAREST = 3

TEXT = """\
One iteration under `jax.profiler`, all guards on, after three that were not: what ran on the device, by how often it
ran. As often as there are minibatches is a *minibatch*, as often as environments were stepped a *step*, all else the
*rest*. *Kernels* is how many run each time, *µs* how long they take together, *share* of the time in which any kernel
ran; then the dearest, with their part of that share. A profiler slows what is short: for rates see above."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ran under one name.

    Attributes:
        name: Of the operation in the compiled program.
        count: How often.
        seconds: In all.
    """

    name: str
    count: int
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kernels` takes besides what all benchmarks take."""
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; all of them by default")


def run(task: str, start: Callable[[Sequence[str], Path], Any]) -> Row:
    """Profiles an iteration of a task.

    Args:
        task: By name.
        start: Makes a run of overrides in a folder, compiled; a call is an iteration.
    """
    import jax

    config = compose([*PARTS[task]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        side = start(PARTS[task], folder / "run")
        try:
            for _ in range(WARM_UP):
                side()
            with jax.profiler.trace(str(folder / "profile")):
                side()
        finally:
            side.close()
        kernels = read(next((folder / "profile").rglob("*.trace.json.gz")))
    return {"task": task, "times": times_of(config), "kernels": [dataclasses.asdict(kernel) for kernel in kernels]}


def times_of(config: Config) -> dict[str, int]:
    """How often the parts of an iteration run."""
    ppo = config.ppo
    return {
        "minibatch": ppo.num_minibatches * ppo.num_updates_per_batch,
        "step": config.env_steps_per_iteration // (ppo.num_envs * config.env.action_repeat),
    }


def read(path: Path) -> list[Kernel]:
    """The kernels of a profile, dearest first: what XLA says an operation of a program is behind.

    Args:
        path: A trace as `jax.profiler` writes it, `*.trace.json.gz`.
    """
    with gzip.open(path) as file:
        return kernels_of(json.load(file)["traceEvents"])


def kernels_of(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The same, of its events; an operation that has others inside, as a loop has, is none itself."""
    count: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for event in events:
        operation = event.get("args", {}).get("hlo_op")
        if event.get("ph") != "X" or operation is None or operation.split(".")[0] in ("while", "conditional", "call"):
            continue
        count[operation] += 1
        seconds[operation] += event["dur"] / 1e6
    return [Kernel(name, count[name], total) for name, total in seconds.most_common()]


def section(measured: Sequence[Row]) -> Section:
    """The report.

    Args:
        measured: A row for every task.
    """
    header = ("task", "of a", "times", "kernels", "µs", "share", "dearest")
    cells = []
    for row in measured:
        kernels = [Kernel(**kernel) for kernel in row["kernels"]]
        whole = sum(kernel.seconds for kernel in kernels)
        for part, times in (*row["times"].items(), ("rest", None)):
            own = [kernel for kernel in kernels if part_of(kernel, row["times"]) == part]
            busy = sum(kernel.seconds for kernel in own)
            dearest = ", ".join(f"{kernel.name} {kernel.seconds / whole:.2f}" for kernel in own[:DEAREST])
            launches = sum(kernel.count for kernel in own) / (times or 1)
            cells.append(
                (
                    row["task"],
                    part,
                    f"{times or 1:,}",
                    f"{launches:,.0f}",
                    f"{busy / (times or 1) * 1e6:,.0f}",
                    f"{busy / whole:.2f}",
                    dearest,
                )
            )
    notes = [f"{row['task']}: `{' '.join(PARTS[row['task']])}`" for row in measured]
    return Section(NAME, "What runs on the device", TEXT, header, cells, notes, list(measured), [])


def part_of(kernel: Kernel, times: Mapping[str, int]) -> str:
    """Of which part it is, by how often it ran: as often as that, or several times as often, the most often first."""
    for part, number in sorted(times.items(), key=lambda item: -item[1]):
        if kernel.count % number == 0:
            return part
    return "rest"
