"""Profiles an iteration: which kernels run on the device, how often and for how long."""

import argparse
import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from scripts import results
from scripts.arguments import add_choice
from scripts.bench.parts import Parts
from scripts.bench.side import Side
from scripts.pages import Section
from scripts.results import Row
from scripts.sittings import Sitting

NAME, HELP = "kernels", "kernels of an iteration on the device"
# Published hyperparameters, whose loop over minibatches decides the speed on an accelerator, and a small task.
TASKS = {
    "fast": ("env=fast",),
    "ant": ("env=ant", "ppo=ant", "env.backend=mjx"),
    "humanoid": ("env=humanoid", "ppo=humanoid", "env.backend=mjx"),
}
# Without the compile cache, because a cached program can have old names of operations.
COMMON = ("seed=0", "devices=1", "compile_cache=null")
PARTS = {task: (*own, *COMMON) for task, own in TASKS.items()}
WARM_UP = 3
DEAREST = 3
_MODULE = "jit_iteration"
_MOST_EVENTS = 1_000_000  # the profiler silently drops further events
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "--task", TASKS)


def parts(args: argparse.Namespace, console: Console) -> Parts:
    def measure(task: str, sitting: Sitting) -> list[Row]:
        with console.status(f"{task}: compiling and profiling"):
            return [run(task, Side)]

    return Parts(NAME, PARTS, args.task or [*TASKS], {}, measure, section)


def run(task: str, start: Callable[[Sequence[str], Path], Any]) -> Row:
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
            f"kernels: an iteration of {task} has more events than the {_MOST_EVENTS:,} that a profile holds"
        )
    return {"task": task, "times": times_of(compose([*PARTS[task]])), "kernels": kernels_of(events, text)}


def times_of(config: Config) -> dict[str, int]:
    """Returns how often each part of an iteration runs."""
    ppo = config.ppo
    return {
        "collect": config.env_steps_per_iteration // (ppo.num_envs * config.env.action_repeat),
        "learn": ppo.num_minibatches * ppo.num_updates_per_batch,
        "rest": 1,
    }


def kernels_of(events: Iterable[Mapping[str, Any]], text: str) -> list[Row]:
    """Returns the kernels of a profile, dearest first, without operations that contain others, such as loops.

    A row has the operation's `name`, the `count` of launches, their total `seconds` and the `part` of the iteration.
    """
    part = parts_of(text)
    count: collections.Counter[str] = collections.Counter()
    seconds: collections.Counter[str] = collections.Counter()
    for event in events:
        args = event.get("args", {})
        operation = args.get("hlo_op", "")
        in_iteration = event.get("ph") == "X" and args.get("hlo_module", "").startswith(_MODULE)
        if in_iteration and operation.split(".")[0] not in ("", "while", "conditional", "call"):
            count[operation] += 1
            seconds[operation] += event["dur"] / 1e6
    return [
        {"name": name, "count": count[name], "seconds": total, "part": part.get(name, "rest")}
        for name, total in seconds.most_common()
    ]


def parts_of(text: str) -> dict[str, str]:
    """Returns the part of every operation of a compiled program: its own scope, or the scope of a surrounding loop."""
    inside: dict[str, str] = {}  # computation by operation
    caller: dict[str, str] = {}  # an operation that calls a computation, by computation
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


def section(rows: Sequence[Row]) -> Section:
    header = ("task", "part", "times", "kernels", "µs", "share", "dearest")
    cells = []
    for row in rows:
        whole = sum(kernel["seconds"] for kernel in row["kernels"])
        for part, times in row["times"].items():
            own = results.matching(row["kernels"], part=part)
            busy = sum(kernel["seconds"] for kernel in own)
            dearest = ", ".join(f"{kernel['name']} {kernel['seconds'] / whole:.2f}" for kernel in own[:DEAREST])
            launches = sum(kernel["count"] for kernel in own) / times
            numbers = (f"{times:,}", f"{launches:,.0f}", f"{busy / times * 1e6:,.0f}", f"{busy / whole:.2f}")
            cells.append((row["task"], part, *numbers, dearest))
    notes = [f"{row['task']}: `{' '.join(PARTS[row['task']])}`" for row in rows]
    return Section(NAME, "What runs on the device", header, cells, notes, list(rows))
