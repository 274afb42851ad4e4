"""Measures how cost grows with the number of environments, the episode length and the steps already done."""

import argparse
import contextlib
import dataclasses
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
from scripts.sittings import Sitting

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


def settings(task: str, envs: int, length: int) -> tuple[str, ...]:
    """Returns the overrides of a point, in which an iteration has `UNROLL` steps of every environment."""
    return (
        *TASKS[task], "seed=0", "devices=1", f"env.episode_length={length}", f"ppo.num_envs={envs}",
        f"ppo.batch_size={envs // MINIBATCHES}", f"ppo.num_minibatches={MINIBATCHES}", f"ppo.unroll_length={UNROLL}",
        "ppo.num_updates_per_batch=1",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Point:
    """A run of a task; `over` varies (`envs`, `length` or `done`), and the run has its value `at`."""

    task: str
    over: str
    at: int = 0  # 0 for `done`, whose run has all values

    def __str__(self) -> str:
        return f"{self.task}, {self.over}" + (f" {self.at}" if self.at else "")

    @property
    def settings(self) -> tuple[str, ...]:
        envs = self.at if self.over == "envs" else AMONG
        return settings(self.task, envs, self.at if self.over == "length" else 1000)


POINTS = {
    str(point): point
    for task in TASKS
    for point in (
        *(Point(task, "envs", envs) for envs in ENVS),
        *(Point(task, "length", length) for length in LENGTHS),
        Point(task, "done"),
    )
}
PARTS = {name: point.settings for name, point in POINTS.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_choice(parser, "--task", TASKS)
    parser.add_argument(
        "--seconds", type=arguments.positive("seconds"), default=6.0, help="of measuring per point; default: 6"
    )


def parts(args: argparse.Namespace, console: Console) -> Parts:
    chosen = [name for task in args.task or TASKS for name, point in POINTS.items() if point.task == task]

    def measure(name: str, sitting: Sitting) -> list[Row]:
        return run(POINTS[name], args.seconds, Side, console.print)

    def make_section(rows: list[Row]) -> Section:
        return section(rows, results.device()["kind"], args.out.parent)

    return Parts(NAME, PARTS, chosen, {"seconds": args.seconds}, measure, make_section)


def run(point: Point, seconds: float, start: Start, say: Callable[[str], None]) -> list[Row]:
    """Measures a point; steps done have `AGES` rows.

    A row has what varies (`over`), its value (`at`) and the steps per second by quarter of the iterations (`sps`).
    """
    rows = []
    with _running(start, point.settings) as side:
        if point.over == "done":
            count = _iterations(side, AGES * seconds)
            steps = [side.steps * (1 + age * count // AGES) for age in range(AGES)]
            measured = [(at, _rates(side, count // AGES)) for at in steps]
        else:
            measured = [(point.at, _rates(side, _iterations(side, seconds)))]
    for at, sps in measured:
        say(f"{point.task}: {point.over} {at:,}: {np.median(sps):,.0f} steps/s")
        rows.append({"task": point.task, "over": point.over, "at": at, "sps": sps})
    return rows


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


def cells_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Returns the table: a row per task and value that varies."""
    cells = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for over, (name, _) in _OVER.items():
            own = results.matching(rows, task=task, over=over)
            if not own:
                continue
            rates = [float(np.median(row["sps"])) for row in own]
            ends = f"{rates[0]:,.0f}\n{rates[-1]:,.0f}"
            span = (f"{own[0]['at']:,}", f"{own[-1]['at']:,}")
            cells.append((task, name, *span, ends, f"{min(rates):,.0f}", f"{max(rates):,.0f}"))
    return cells


def section(rows: Sequence[Row], kind: str, folder: Path) -> Section:
    """Returns the section of the page for a kind of device, and draws its picture into the page's folder."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    picture = pages.file_name("scaling", kind)
    _draw(rows, tasks, folder / picture)
    header = ("task", "over", "from", "to", "steps/s\nat its ends", "least", "greatest")
    notes = [f"{task}: `{' '.join(settings(task, AMONG, 1000))}`" for task in tasks]
    pictures = [f"![how cost grows]({picture})"]
    return Section(NAME, "How cost grows", header, cells_of(rows), notes, list(rows), pictures)


def _draw(rows: Sequence[Row], tasks: Sequence[str], path: Path) -> None:
    layout = {"ncols": len(_OVER), "figsize": (10, 3), "constrained_layout": True}
    with pages.picture(path, dpi=150, tight=False, **layout) as (_, panels):
        for panel, (over, (_, label)) in zip(panels, _OVER.items(), strict=True):
            for task in tasks:
                own = results.matching(rows, task=task, over=over)
                if not own:
                    continue
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
