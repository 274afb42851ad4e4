"""What an iteration is made of on its device: which kernels run, how often and for how long, by a profile of one."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from scripts.race.page import Section

Row = dict[str, Any]
NAME = "kernels"
# The published hyperparameters, whose loop over minibatches is what counts on an accelerator, and something small.
TASKS = {
    "fast": ("env=fast",),
    "ant": ("env=ant", "ppo=ant", "env.backend=mjx"),
    "humanoid": ("env=humanoid", "ppo=humanoid", "env.backend=mjx"),
}
# A kept program may be of a time when its operations had other names.
COMMON = ("seed=0", "devices=1", "compile_cache=null")
PARTS = {task: (*own, *COMMON) for task, own in TASKS.items()}
WARM_UP = 3
DEAREST = 3
_MODULE = "jit_iteration"
_MOST_EVENTS = 1_000_000  # that a trace holds; the rest is left out without a word
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")

TEXT = """\
One iteration under `jax.profiler`, all guards on, after three that were not: which operations of its program ran on the
device, by the part of it that they belong to (`jax.named_scope`). *collect* is for every step of the environments,
*learn* for every minibatch, *rest* for the iteration. *Kernels* is how many run each time, *µs* how long they take,
added up, *share* that of all of them; then the dearest, each with its share. A profiler slows what is short: for rates
see above."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ran under one name.

    Attributes:
        name: Of the operation in the compiled program.
        count: How often.
        seconds: In all.
        part: Of the iteration: `collect`, `learn` or `rest`.
    """

    name: str
    count: int
    seconds: float
    part: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `kernels` takes besides what all benchmarks take."""
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; all of them by default")


def run(task: str, start: Callable[[Sequence[str], Path], Any]) -> Row:
    """Profiles an iteration of a task.

    Args:
        task: By name.
        start: Makes a run of overrides in a folder, compiled; a call is an iteration, `text` the program.

    Raises:
        ConfigError: More ran than a profile holds.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        side = start(PARTS[task], folder / "run")
        try:
            for _ in range(WARM_UP):
                side()
            with jax.profiler.trace(str(folder / "profile"), profiler_options=options):
                side()
            text = side.text
        finally:
            side.close()
        with gzip.open(next((folder / "profile").rglob("*.trace.json.gz"))) as file:
            events = json.load(file)["traceEvents"]
    if len(events) >= _MOST_EVENTS:
        raise ConfigError(
            f"kernels: more than {_MOST_EVENTS:,} things ran in an iteration of {task}; profile less of it"
        )
    kernels = kernels_of(events, text)
    times = times_of(compose([*PARTS[task]]))
    return {"task": task, "times": times, "kernels": [dataclasses.asdict(kernel) for kernel in kernels]}


def times_of(config: Config) -> dict[str, int]:
    """How often the parts of an iteration run."""
    ppo = config.ppo
    return {
        "collect": config.env_steps_per_iteration // (ppo.num_envs * config.env.action_repeat),
        "learn": ppo.num_minibatches * ppo.num_updates_per_batch,
        "rest": 1,
    }


def kernels_of(events: Iterable[Mapping[str, Any]], text: str) -> list[Kernel]:
    """The kernels of a profile, dearest first; an operation that has others inside, as a loop has, is none.

    Args:
        events: Of the trace.
        text: The compiled program, which says from where in the iteration an operation is.
    """
    parts = parts_of(text)
    count: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for event in events:
        args = event.get("args", {})
        operation = args.get("hlo_op", "")
        its_own = event.get("ph") == "X" and args.get("hlo_module", "").startswith(_MODULE)
        if its_own and operation.split(".")[0] not in ("", "while", "conditional", "call"):
            count[operation] += 1
            seconds[operation] += event["dur"] / 1e6
    return [Kernel(name, count[name], total, parts.get(name, "rest")) for name, total in seconds.most_common()]


def parts_of(text: str) -> dict[str, str]:
    """The part of every operation of a compiled program: its own, or that of the loop or call which it is in."""
    inside: dict[str, str] = {}  # operations by name: the computation they are in
    caller: dict[str, str] = {}  # computations by name: an operation that calls them
    named: dict[str, str] = {}
    computation = ""
    for line in text.splitlines():
        begins, operation = _COMPUTATION.match(line), _OPERATION.match(line)
        if begins and not line.startswith(" "):
            computation = begins[1]
        elif operation:
            inside[operation[1]] = computation
            caller |= dict.fromkeys(_CALLED.findall(line), operation[1])
            scope = _SCOPE.search(line)
            names = scope[1].split("/") if scope else []
            if "collect" in names or "learn" in names:
                named[operation[1]] = "collect" if "collect" in names else "learn"
    found = {}
    for operation in inside:
        at = operation
        while at not in named and inside[at] in caller:
            at = caller[inside[at]]
        found[operation] = named.get(at, "rest")
    return found


def section(measured: Sequence[Row]) -> Section:
    """The report.

    Args:
        measured: A row for every task.
    """
    header = ("task", "part", "times", "kernels", "µs", "share", "dearest")
    cells = []
    for row in measured:
        kernels = [Kernel(**kernel) for kernel in row["kernels"]]
        whole = sum(kernel.seconds for kernel in kernels)
        for part, times in row["times"].items():
            own = [kernel for kernel in kernels if kernel.part == part]
            busy = sum(kernel.seconds for kernel in own)
            dearest = ", ".join(f"{kernel.name} {kernel.seconds / whole:.2f}" for kernel in own[:DEAREST])
            launches = sum(kernel.count for kernel in own) / times
            numbers = (f"{times:,}", f"{launches:,.0f}", f"{busy / times * 1e6:,.0f}", f"{busy / whole:.2f}")
            cells.append((row["task"], part, *numbers, dearest))
    notes = [f"{row['task']}: `{' '.join(PARTS[row['task']])}`" for row in measured]
    return Section(NAME, "What runs on the device", TEXT, header, cells, notes, list(measured), [])
