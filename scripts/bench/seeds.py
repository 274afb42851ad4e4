"""Times several seeds in one program beside one run per seed, as whole processes."""

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from scripts import results
from scripts.arguments import add_choice, whole
from scripts.bench.parts import Parts
from scripts.pages import Section
from scripts.results import Row
from scripts.sittings import Sitting

NAME, HELP = "seeds", "several seeds in one program"
# A run takes about ten seconds, so that its start has a usual share of the time.
TASKS = {
    "inverted_pendulum": ("env=inverted_pendulum", "total_steps=100_000"),
    "hopper": ("env=hopper", "total_steps=150_000"),
    "humanoid": ("env=humanoid", "total_steps=100_000"),
}
# On an accelerator, one task that leaves most of the device idle, and one whose 10 iterations fill the device.
ON_ACCELERATOR = {
    "inverted_pendulum": TASKS["inverted_pendulum"],
    "ant, published": ("env=ant", "ppo=ant", "total_steps=3_000_000"),
}
COMMON = ("devices=1", "eval.num_evals=4", "eval.target_return=null", "logging=quiet", "quick_compile_iterations=0")
PARTS = {task: (*own, *COMMON) for task, own in (TASKS | ON_ACCELERATOR).items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_choice(parser, "--task", PARTS, "those for this device")
    parser.add_argument("--seeds", type=whole(1), default=8, help="number of seeds; default: 8")
    parser.add_argument("--rounds", type=whole(1), default=3, help="rounds of both in turn; default: 3")


def parts(args: argparse.Namespace, console: Console) -> Parts:
    usual = TASKS if results.device()["platform"] == "cpu" else ON_ACCELERATOR

    def measure(task: str, sitting: Sitting) -> list[Row]:
        rounds = itertools.takewhile(lambda number: number < 2 or sitting.remaining > 0, range(args.rounds + 1))
        return [run(task, args.seeds, rounds, console.print)]

    asked = {"seeds": args.seeds, "rounds": args.rounds}
    return Parts(NAME, PARTS, args.task or [*usual], asked, measure, section)


def train(overrides: Sequence[str], folder: Path) -> None:
    command = [sys.executable, "-m", "rlstable.train", *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-500:]}")


def run(
    task: str,
    seeds: int,
    rounds: Iterable[int],
    say: Callable[[str], None],
    start: Callable[[Sequence[str], Path], None] = train,
) -> Row:
    """Measures a task: seconds by round of one process with all seeds (`together`), and of one each (`alone`).

    Args:
        task: Name of the part.
        seeds: Number of seeds.
        rounds: Numbers of the rounds; round 0 only compiles.
        say: Prints a line per round.
        start: Trains in a folder.
    """
    row: Row = {"task": task, "seeds": seeds, "together": [], "alone": []}
    for number in rounds:
        together = _seconds(start, [_together(task, seeds)])
        alone = _seconds(start, _alone(task, seeds if number else 1))
        if number == 0:
            continue  # this round only compiled the programs
        row["together"].append(together)
        row["alone"].append(alone)
        say(f"{task}: {seeds} seeds in {together:.1f} s together, in {alone:.1f} s one after another")
    return row


def _together(task: str, seeds: int) -> list[str]:
    return [*PARTS[task], f"seeds={seeds}"]


def _alone(task: str, seeds: int) -> list[list[str]]:
    return [[*PARTS[task], f"seed={seed}"] for seed in range(seeds)]


def _seconds(start: Callable[[Sequence[str], Path], None], commands: Sequence[Sequence[str]]) -> float:
    began = time.perf_counter()
    for overrides in commands:
        with tempfile.TemporaryDirectory() as folder:
            start(overrides, Path(folder) / "run")
    return time.perf_counter() - began


def section(measured: Sequence[Row]) -> Section:
    header = ("task", "seeds", "together,\nseconds", "one after another,\nseconds", "times sooner", "from", "to")
    cells, rows, notes = [], [], []
    for row in measured:
        ratios = np.array(row["alone"]) / np.array(row["together"])
        seconds = (f"{np.median(row['together']):.1f}", f"{np.median(row['alone']):.1f}")
        ends = (f"{np.median(ratios):.2f}", f"{ratios.min():.2f}", f"{ratios.max():.2f}")
        cells.append((row["task"], f"{row['seeds']}", *seconds, *ends))
        rows.append(row | {"ratios": ratios.tolist()})
        overrides = " ".join(_together(row["task"], row["seeds"]))
        notes.append(f"{row['task']}: `{overrides}`, {len(row['together'])} rounds")
    return Section(NAME, "Several seeds at once", header, cells, notes, rows)
