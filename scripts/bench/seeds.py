"""Several seeds in one program beside one run per seed, whole processes from Enter to the last word."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.race.page import Section

Row = dict[str, Any]
NAME = "seeds"
# Environment steps that make a run of some ten seconds, so that the start is no more of it than it often is.
TASKS = {
    "inverted_pendulum": ("env=inverted_pendulum", "total_steps=100_000"),
    "hopper": ("env=hopper", "total_steps=150_000"),
    "humanoid": ("env=humanoid", "total_steps=100_000"),
}
COMMON = ("devices=1", "eval.num_evals=4", "eval.target_return=null", "logging=quiet")
PARTS = {task: (*own, *COMMON) for task, own in TASKS.items()}

TEXT = """\
`seeds=N` in one process, and N processes with `seed=0`, `seed=1` and so on one after another, in turn; wall time from
Enter to the end of the last process, imports, evaluations, checkpoints and reports included, programs compiled by an
earlier run of each kind. All guards on, supervised. The ratio is that of one round's two times, its median and range
over the rounds: how many times sooner all seeds are there."""


@dataclasses.dataclass(frozen=True)
class Times:
    """What was measured of a task.

    Attributes:
        task: By name.
        seeds: How many.
        together: Seconds of one process with all of them, per round.
        alone: Seconds of a process each, one after another, per round.
    """

    task: str
    seeds: int
    together: list[float]
    alone: list[float]


# Runs a command with overrides to its end; the folder is for what it leaves.
Run = Callable[[Sequence[str], Path], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `seeds` takes besides what all benchmarks take."""
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; all of them by default")
    parser.add_argument("--seeds", type=_count, default=8, help="how many, 8 by default")
    parser.add_argument("--rounds", type=_count, default=3, help="of both in turn, 3 by default")


def _count(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, more than 0")


def train(overrides: Sequence[str], folder: Path) -> None:
    """Trains in a process of its own.

    Raises:
        RuntimeError: It failed; with its last words.
    """
    command = [sys.executable, "-m", "rlstable.train", *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-500:]}")


def run(task: str, seeds: int, rounds: int, say: Callable[[str], None], start: Run = train) -> Row:
    """Measures a task; the row is that of `Times`.

    Args:
        task: By name.
        seeds: How many.
        rounds: Of both in turn.
        say: Told of every round.
        start: Trains to the end.
    """
    found = Times(task, seeds, [], [])
    for number in range(rounds + 1):
        together = _seconds(start, [_together(task, seeds)])
        alone = _seconds(start, _alone(task, seeds if number else 1))
        if number == 0:
            continue  # what compiled is on the disk now
        found.together.append(together)
        found.alone.append(alone)
        say(f"{task}: {seeds} seeds in {together:.1f} s together, in {alone:.1f} s one after another")
    return dataclasses.asdict(found)


def _together(task: str, seeds: int) -> list[str]:
    return [*TASKS[task], *COMMON, f"seeds={seeds}"]


def _alone(task: str, seeds: int) -> list[list[str]]:
    return [[*TASKS[task], *COMMON, f"seed={seed}"] for seed in range(seeds)]


def _seconds(start: Run, commands: Sequence[Sequence[str]]) -> float:
    began = time.perf_counter()
    for overrides in commands:
        with tempfile.TemporaryDirectory() as folder:
            start(overrides, Path(folder) / "run")
    return time.perf_counter() - began


def section(measured: Sequence[Row]) -> Section:
    """The report.

    Args:
        measured: A row for every task.
    """
    found = [Times(row["task"], row["seeds"], row["together"], row["alone"]) for row in measured]
    header = ("task", "seeds", "together,\nseconds", "one after another,\nseconds", "times sooner", "from", "to")
    cells, rows = [], []
    for row, own in zip(measured, found, strict=True):
        ratios = np.array(own.alone) / np.array(own.together)
        seconds = (f"{np.median(own.together):.1f}", f"{np.median(own.alone):.1f}")
        ends = (f"{np.median(ratios):.2f}", f"{ratios.min():.2f}", f"{ratios.max():.2f}")
        cells.append((own.task, f"{own.seeds}", *seconds, *ends))
        rows.append(row | {"ratios": ratios.tolist()})
    notes = [f"{own.task}: `{' '.join(_together(own.task, own.seeds))}`, {len(own.together)} rounds" for own in found]
    return Section(NAME, "Several seeds at once", TEXT, header, cells, notes, rows, [])
