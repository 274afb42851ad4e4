"""Measures all that can run on one GPU, most telling first, within a limit of time."""

import argparse
import contextlib
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from rlstable.config import ConfigError
from scripts import results, sittings
from scripts.bench import kernels, scaling, seeds
from scripts.bench.parts import PartsRun
from scripts.race import page
from scripts.race.race import Race
from scripts.results import Row
from scripts.sittings import Sitting

NAME, HELP = "gpu", "all benchmarks that run on a GPU, most telling first"
Start = Callable[[Sequence[str], float | None], int | None]
GRACE = 20.0  # seconds in which a step that was told to end stops its processes


@dataclasses.dataclass(frozen=True)
class Step:
    """A benchmark, without settings that need a CPU."""

    share: int  # of the time; what a step does not use goes to the later steps
    words: tuple[str, ...]  # its command line

    def __str__(self) -> str:
        return " ".join(self.words)


_STARTS = ("race", "--measure=start", "--task=ant", "--task=humanoid")
_GOALS = ("race", "--measure=threshold", "--task=ant", "--task=humanoid", "--side=ours", "--side=brax")
PLAN = (
    Step(35, (*_STARTS, "--rounds=1")),  # its time includes making the environments of Brax and RSL-RL
    Step(13, ("guards", "--pairs=20")),
    Step(8, ("kernels", "--task=ant", "--task=humanoid")),
    Step(14, (*_GOALS, "--rounds=1")),
    Step(8, ("supervision", "--pairs=20")),
    Step(8, ("seeds", "--rounds=1")),
    Step(9, ("scaling", "--task=ant", "--seconds=2")),
    Step(5, _STARTS),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the plan is fixed."""


def start(words: Sequence[str], limit: float | None) -> int | None:
    """Runs a step in a process, which gives its GPU memory back; returns the exit code, None at the limit."""
    process = subprocess.Popen([sys.executable, "-m", "scripts.bench", *words])
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        process.kill()
        process.wait()


def run(
    args: argparse.Namespace,
    prepare: Callable[[Sequence[str]], Race | PartsRun],
    console: Console,
    start: Start = start,
) -> Sitting:
    """Runs the steps that the sitting lacks, and prints one table of what was measured, also when it is stopped.

    Args:
        args: The command line.
        prepare: Returns the benchmark of a step's command line, with its measurements so far.
        console: Prints the table.
        start: Runs a step's command line for at most so many seconds.
    """
    device = results.device()
    if device["platform"] != "gpu":
        raise ConfigError("gpu: jax finds no GPU here; nvidia-smi says whether there is a driver")
    file = args.out.parent / "race.jsonl"
    sitting = sittings.opened(args, sittings.newest(results.read(file), device["kind"]))
    steps = [[*step.words, f"--sitting={sitting.name}", f"--out={args.out}"] for step in PLAN]
    steps = [[*words, f"--results={file}"] if words[0] == "race" else words for words in steps]
    try:
        for number, words in enumerate(steps):
            if sitting.remaining > 0 and prepare(words).missing(sitting.name):
                share = PLAN[number].share / sum(step.share for step in PLAN[number:])
                _run(PLAN[number], words, sitting, share, start)
    finally:
        benchmarks = [prepare(words) for words in steps]
        for step, benchmark in zip(PLAN, benchmarks, strict=True):
            sitting.left_out += [f"{step.words[0]} {name}" for name in benchmark.missing(sitting.name)]
        _show([line for one in benchmarks for line in headlines(one, sitting.name)], device, sitting, console)
    return sitting


def _run(step: Step, words: Sequence[str], sitting: Sitting, share: float, start: Start) -> None:
    """Runs a step for its share of the remaining time. A step that is measuring then may take twice its share."""
    if sitting.remaining == math.inf:
        code = start(words, None)
    else:
        seconds = share * sitting.remaining
        code = start([*words, f"--minutes={seconds / 60}"], min(2 * seconds, sitting.remaining))
    if code:
        sitting.failed.append(f"{step}: exit code {code}, see above")


def _show(lines: Sequence[tuple[str, ...]], device: Row, sitting: Sitting, console: Console) -> None:
    table = Table(title=f"{device['kind']}, sitting begun {sitting.name[:16]} UTC")
    for number, name in enumerate(("measured", "side", "value", "ratio")):
        table.add_column(name, justify="right" if number > 1 else "left")
    for line in dict.fromkeys(lines):
        table.add_row(*line)
    console.print(table)
    for text in (sittings.listed("failed", sitting.failed), sittings.listed("not measured", sitting.left_out)):
        if text:
            console.print(text, soft_wrap=True)


def headlines(benchmark: Race | PartsRun, sitting: str) -> list[tuple[str, str, str, str]]:
    """Returns lines of the table: measurement, side, value and ratio.

    A ratio above 1 means that rlstable is better than another side, or its guards and so on than doing without.
    """
    if isinstance(benchmark, PartsRun):
        return LINES[benchmark.name](benchmark.name, benchmark.rows(sitting=sitting))
    found = benchmark.results(sitting)
    return [
        (one.what, one.side, _value(one.value), "" if one.ratio is None else f"{one.ratio:.2f}")
        for name in page.NAMES
        for one in page.medians(found, name)
    ]


def _value(value: float) -> str:
    return "not reached" if value == math.inf else page.digits(value)


def _pairs(name: str, rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    lines = []
    for row in rows:
        first, second = (key for key in row if key.startswith("sps_"))
        for key, ratio in ((first, ""), (second, f"{row['ratio']:.2f}")):
            lines.append((f"{name}: {row['env']}", key.removeprefix("sps_"), f"{row[key]:,.0f} steps/s", ratio))
    return lines


def _kernels(name: str, rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    cells = kernels.section(rows).cells
    return [(f"{name}: {task}, {part}", f"{count} kernels", f"{us} µs", "") for task, part, _, count, us, *_ in cells]


def _seeds(name: str, rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    lines = []
    for task, count, together, alone, ratio, *_ in seeds.section(rows).cells:
        lines.append((f"{name}: {task}, {count} seeds", "one after another", f"{alone} s", ""))
        lines.append((f"{name}: {task}, {count} seeds", "together", f"{together} s", ratio))
    return lines


def _scaling(name: str, rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    return [
        (f"{name}: {task}, {over}", f"{first} to {last}", f"{ends.replace(chr(10), ' to ')} steps/s", "")
        for task, over, first, last, ends, *_ in scaling.cells_of(rows)
    ]


LINES = {"guards": _pairs, "supervision": _pairs, "kernels": _kernels, "seeds": _seeds, "scaling": _scaling}
