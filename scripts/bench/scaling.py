"""How cost grows: with the number of environments, with the length of episodes, with the steps already done."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from scripts.race.page import Section

Row = dict[str, Any]
NAME = "scaling"
TASKS = {
    "inverted_pendulum": ("env=inverted_pendulum",),
    "ant": ("env=ant", "ppo=ant_cpu"),
}
UNROLL, MINIBATCHES = 8, 4
ENVS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
LENGTHS = (125, 250, 500, 1000, 2000, 4000, 8000)
AMONG = 256  # environments where their number is not what is varied
AGES = 8  # parts of a run that are compared

TEXT = f"""\
One run at a time, all guards on, supervised, with {UNROLL} steps of every environment an iteration, {MINIBATCHES}
minibatches and one epoch, so that an iteration is the same work for every step. Environment steps per second of whole
iterations, the median and the range of its quarters, over the number of environments and, with {AMONG} of them, over
the length of episodes; and, in one long run, over how much of it is done. Cost that grows linearly is a level line; the
left end of the first is what an iteration costs however small it is."""


class Advancing(Protocol):
    """A run that is timed, `bench.Side`."""

    steps: int

    def __call__(self) -> float:
        """Seconds of one iteration."""

    def close(self) -> None:
        """Gives its folder free."""


Start = Callable[[Sequence[str], Path], Advancing]


@dataclasses.dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        task: By name.
        over: What is varied: `envs`, `length` or `done`.
        at: Its value; for `done` environment steps.
        sps: Environment steps per second, one per quarter of the iterations.
    """

    task: str
    over: str
    at: int
    sps: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `scaling` takes besides what all benchmarks take."""
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; all of them by default")
    parser.add_argument("--seconds", type=_seconds, default=6.0, help="of measuring per point, 6 by default")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0")


def run(task: str, seconds: float, start: Start, say: Callable[[str], None]) -> list[Row]:
    """Measures every point of a task; rows are those of `Point`.

    Args:
        task: By name.
        seconds: Of measuring per point.
        start: Makes a run of overrides in a folder, compiled.
        say: Told of every point.
    """
    points = []
    for point in _points(task, seconds, start):
        say(f"{task}: {point.over} {point.at:,}: {np.median(point.sps):,.0f} steps/s")
        points.append(dataclasses.asdict(point))
    return points


def _points(task: str, seconds: float, start: Start) -> Iterator[Point]:
    for envs in ENVS:
        with _running(start, settings(task, envs, 1000)) as side:
            yield Point(task, "envs", envs, _rates(side, seconds, 4))
    for length in LENGTHS:
        with _running(start, settings(task, AMONG, length)) as side:
            yield Point(task, "length", length, _rates(side, seconds, 4))
    with _running(start, settings(task, AMONG, 1000)) as side:
        count = _iterations(side, AGES * seconds)
        for age in range(AGES):
            done = side.steps * (1 + age * count // AGES)
            yield Point(task, "done", done, _quarters(side, count // AGES, 4))


def settings(task: str, envs: int, length: int) -> tuple[str, ...]:
    """The overrides of a point, in which an iteration has `UNROLL` steps of every environment."""
    return (
        *TASKS[task], "seed=0", "devices=1", f"env.episode_length={length}", f"ppo.num_envs={envs}",
        f"ppo.batch_size={envs // MINIBATCHES}", f"ppo.num_minibatches={MINIBATCHES}", f"ppo.unroll_length={UNROLL}",
        "ppo.num_updates_per_batch=1",
    )  # fmt: skip


@contextlib.contextmanager
def _running(start: Start, overrides: Sequence[str]) -> Iterator[Advancing]:
    with tempfile.TemporaryDirectory() as folder:
        side = start(overrides, Path(folder))
        try:
            for _ in range(3):  # in the third a run measures how its time divides
                side()
            yield side
        finally:
            side.close()


def _rates(side: Advancing, seconds: float, parts: int) -> tuple[float, ...]:
    return _quarters(side, _iterations(side, seconds), parts)


def _iterations(side: Advancing, seconds: float) -> int:
    """How many iterations take about so long, eight at least."""
    return max(8, int(seconds / max(min(side(), side()), 1e-6)))


def _quarters(side: Advancing, count: int, parts: int) -> tuple[float, ...]:
    """Environment steps per second by parts of some iterations, each by its median iteration."""
    times = np.array([side() for _ in range(max(count, parts))])
    return tuple(side.steps / float(np.median(part)) for part in np.array_split(times, parts))


def section(rows: Sequence[Row], kind: str, folder: Path) -> Section:
    """The report, and its picture drawn.

    Args:
        rows: Of the points that were measured.
        kind: Of the device.
        folder: Of the page.
    """
    points = [Point(row["task"], row["over"], row["at"], tuple(row["sps"])) for row in rows]
    picture = f"scaling_{re.sub('[^a-z0-9]+', '_', kind.lower())}.png"
    _draw(points, folder / picture)
    names = {"envs": "environments", "length": "episode length", "done": "steps done"}
    header = ("task", "over", "from", "to", "steps/s\nat its ends", "least", "greatest")
    cells = []
    for task in dict.fromkeys(point.task for point in points):
        for over, name in names.items():
            own = [point for point in points if (point.task, point.over) == (task, over)]
            rates = [float(np.median(point.sps)) for point in own]
            ends = f"{rates[0]:,.0f}\n{rates[-1]:,.0f}"
            span = (f"{own[0].at:,}", f"{own[-1].at:,}")
            cells.append((task, name, *span, ends, f"{min(rates):,.0f}", f"{max(rates):,.0f}"))
    notes = [f"{task}: `{' '.join(settings(task, AMONG, 1000))}`" for task in dict.fromkeys(p.task for p in points)]
    return Section(NAME, "How cost grows", TEXT, header, cells, notes, list(rows), [f"![how cost grows]({picture})"])


PARTS = {task: settings(task, AMONG, 1000) for task in TASKS}


def _draw(points: Sequence[Point], place: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = {"envs": "environments", "length": "steps of an episode", "done": "environment steps done"}
    figure, panels = plt.subplots(1, 3, figsize=(10, 3), constrained_layout=True)
    for panel, (over, label) in zip(panels, labels.items(), strict=True):
        for task in dict.fromkeys(point.task for point in points):
            own = [point for point in points if (point.task, point.over) == (task, over)]
            at, rates = [point.at for point in own], [np.median(point.sps) for point in own]
            low, high = [min(point.sps) for point in own], [max(point.sps) for point in own]
            panel.plot(at, rates, marker="o", markersize=3, label=task)
            panel.fill_between(at, low, high, alpha=0.2)
        panel.set_xscale("linear" if over == "done" else "log", **({} if over == "done" else {"base": 2}))
        panel.set_yscale("log")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("environment steps per second")
    panels[0].legend(frameon=False)
    bottom, top = (function(panel.get_ylim()[n] for panel in panels) for n, function in ((0, min), (1, max)))
    for panel in panels:
        panel.set_ylim(bottom / 1.3, top * 1.3)
    figure.savefig(place, dpi=150)
    plt.close(figure)
