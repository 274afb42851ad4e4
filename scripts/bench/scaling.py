"""Measures how cost grows with the number of environments, the episode length and the steps already done."""

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from scripts import arguments, pages, results
from scripts.bench.parts import Parts
from scripts.bench.side import Side
from scripts.pages import Section
from scripts.results import Row

Start = Callable[[Sequence[str], Path], Any]  # makes a `Side`
NAME, HELP = "scaling", "cost over environments, episode length and steps done"
TASKS = {"inverted_pendulum": ("env=inverted_pendulum",), "ant": ("env=ant", "ppo=ant_cpu")}
UNROLL, MINIBATCHES = 8, 4
ENVS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (125, 250, 500, 1000, 2000, 4000, 8000)
AMONG = 256  # number of environments where it does not vary
AGES = 8  # parts of a run that are compared
_QUARTERS = 4
_OVER = {
    "envs": ("environments", "environments"),
    "length": ("episode length", "steps of an episode"),
    "done": ("steps done", "environment steps done"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_choice(parser, "--task", TASKS)
    parser.add_argument("--seconds", type=arguments.seconds, default=6.0, help="of measuring per point; default: 6")


def parts(args: argparse.Namespace, console: Console) -> Parts:
    def measure(task: str) -> list[Row]:
        return run(task, args.seconds, Side, console.print)

    def make_section(rows: list[Row]) -> Section:
        return section(rows, results.device()["kind"], args.out.parent)

    return Parts(NAME, PARTS, {"seconds": args.seconds}, measure, make_section)


def run(task: str, seconds: float, start: Start, say: Callable[[str], None]) -> list[Row]:
    """Measures every point of a task.

    A row has what varies (`over`: `envs`, `length` or `done`), its value (`at`) and the steps per second by quarter of
    the iterations (`sps`).
    """
    points = []
    for over, at, sps in _points(task, seconds, start):
        say(f"{task}: {over} {at:,}: {np.median(sps):,.0f} steps/s")
        points.append({"task": task, "over": over, "at": at, "sps": sps})
    return points


def _points(task: str, seconds: float, start: Start) -> Iterator[tuple[str, int, list[float]]]:
    for envs in ENVS:
        with _running(start, settings(task, envs, 1000)) as side:
            yield "envs", envs, _rates(side, _iterations(side, seconds))
    for length in LENGTHS:
        with _running(start, settings(task, AMONG, length)) as side:
            yield "length", length, _rates(side, _iterations(side, seconds))
    with _running(start, settings(task, AMONG, 1000)) as side:
        count = _iterations(side, AGES * seconds)
        for age in range(AGES):
            yield "done", side.steps * (1 + age * count // AGES), _rates(side, count // AGES)


def settings(task: str, envs: int, length: int) -> tuple[str, ...]:
    """Returns the overrides of a point, in which an iteration has `UNROLL` steps of every environment."""
    return (
        *TASKS[task], "seed=0", "devices=1", f"env.episode_length={length}", f"ppo.num_envs={envs}",
        f"ppo.batch_size={envs // MINIBATCHES}", f"ppo.num_minibatches={MINIBATCHES}", f"ppo.unroll_length={UNROLL}",
        "ppo.num_updates_per_batch=1",
    )  # fmt: skip


PARTS = {task: settings(task, AMONG, 1000) for task in TASKS}


@contextlib.contextmanager
def _running(start: Start, overrides: Sequence[str]) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        side = start(overrides, Path(folder))
        try:
            for _ in range(3):  # a run measures how its time divides in its third iteration
                side()
            yield side
        finally:
            side.close()


def _iterations(side: Any, seconds: float) -> int:
    """Returns how many iterations take about that time, at least eight."""
    return max(8, int(seconds / max(min(side(), side()), 1e-6)))


def _rates(side: Any, count: int) -> list[float]:
    """Returns environment steps per second by quarter of the iterations, each by its median iteration."""
    times = np.array([side() for _ in range(max(count, _QUARTERS))])
    return [side.steps / float(np.median(part)) for part in np.array_split(times, _QUARTERS)]


def section(rows: Sequence[Row], kind: str, folder: Path) -> Section:
    """Returns the section of the page for a kind of device, and draws its picture into the page's folder."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    picture = pages.file_name("scaling", kind)
    _draw(rows, tasks, folder / picture)
    header = ("task", "over", "from", "to", "steps/s\nat its ends", "least", "greatest")
    cells = []
    for task in tasks:
        for over, (name, _) in _OVER.items():
            own = results.matching(rows, task=task, over=over)
            rates = [float(np.median(row["sps"])) for row in own]
            ends = f"{rates[0]:,.0f}\n{rates[-1]:,.0f}"
            span = (f"{own[0]['at']:,}", f"{own[-1]['at']:,}")
            cells.append((task, name, *span, ends, f"{min(rates):,.0f}", f"{max(rates):,.0f}"))
    notes = [f"{task}: `{' '.join(PARTS[task])}`" for task in tasks]
    return Section(NAME, "How cost grows", header, cells, notes, list(rows), [f"![how cost grows]({picture})"])


def _draw(rows: Sequence[Row], tasks: Sequence[str], path: Path) -> None:
    layout = {"ncols": len(_OVER), "figsize": (10, 3), "constrained_layout": True}
    with pages.picture(path, dpi=150, tight=False, **layout) as (_, panels):
        for panel, (over, (_, label)) in zip(panels, _OVER.items(), strict=True):
            for task in tasks:
                own = results.matching(rows, task=task, over=over)
                at, rates = [row["at"] for row in own], np.array([row["sps"] for row in own])
                panel.plot(at, np.median(rates, axis=1), marker="o", markersize=3, label=task)
                panel.fill_between(at, rates.min(axis=1), rates.max(axis=1), alpha=0.2)
            panel.set_xscale("linear" if over == "done" else "log", **({} if over == "done" else {"base": 2}))
            panel.set_yscale("log")
            panel.set_xlabel(label)
            panel.grid(alpha=0.3, which="both")
        panels[0].set_ylabel("environment steps per second")
        panels[0].legend(frameon=False)
        bottom, top = (function(panel.get_ylim()[n] for panel in panels) for n, function in ((0, min), (1, max)))
        for panel in panels:
            panel.set_ylim(bottom / 1.3, top * 1.3)
