"""Pairs of configurations that are trained in turn in one process, an iteration at a time."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from scripts import results
from scripts.arguments import add_choice, whole
from scripts.bench import side
from scripts.bench.parts import Parts
from scripts.pages import Section
from scripts.results import Row
from scripts.sittings import Sitting

_PENDULUM = ("env=inverted_pendulum", "env.backend=generalized")
# Overrides by the name that --env takes. An iteration takes about a second on two CPU cores.
SETTINGS: dict[str, tuple[str, ...]] = {
    "inverted_pendulum": _PENDULUM,
    # Settings with the same amount of work, for which XLA compiles other programs on both sides.
    "inverted_pendulum, tanh": (*_PENDULUM, "network.activation=tanh"),
    "inverted_pendulum, elu": (*_PENDULUM, "network.activation=elu"),
    "inverted_pendulum, gae once": (*_PENDULUM, "ppo.gae=per_iteration"),
    "inverted_pendulum, entropy": (*_PENDULUM, "ppo.entropy_cost=2e-2"),
    "humanoid": (
        "env=humanoid", "ppo=humanoid", "env.backend=mjx", "ppo.num_envs=256", "ppo.batch_size=128",
        "ppo.num_minibatches=4", "ppo.num_updates_per_batch=8", "ppo.unroll_length=10",
    ),
}  # fmt: skip
# Published hyperparameters, which fill an accelerator.
ON_ACCELERATOR: dict[str, tuple[str, ...]] = {
    "ant, published": ("env=ant", "ppo=ant", "env.backend=mjx"),
    "humanoid, published": ("env=humanoid", "ppo=humanoid", "env.backend=mjx"),
}
COMMON = ("seed=0", "devices=1")
WARM_UP = 4  # a run measures how its time divides in its third iteration
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two configurations; the first is the baseline of the second."""

    name: str  # the subcommand
    title: str  # heading of its section, and help of the subcommand
    sides: dict[str, str]  # overrides by side, separated by spaces

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_choice(parser, "--env", SETTINGS | ON_ACCELERATOR, "those for this device", dest="task")
        parser.add_argument("--pairs", type=whole(2), default=30, help="pairs of calls; default: 30")

    def parts(self, args: argparse.Namespace, console: Console) -> Parts:
        every = SETTINGS | ON_ACCELERATOR
        settings = {name: (*own, *COMMON, *self.sides.values()) for name, own in every.items()}
        usual = SETTINGS if results.device()["platform"] == "cpu" else ON_ACCELERATOR

        def measure(name: str, sitting: Sitting) -> list[Row]:
            pairs = itertools.takewhile(lambda n: n < 2 or sitting.remaining > 0, range(args.pairs))
            return [compare(self, name, every[name], track(pairs, name, args.pairs, console=console), console)]

        asked = {"pairs": args.pairs}
        return Parts(self.name, settings, args.task or [*usual], asked, measure, functools.partial(section, self))


COMPARISONS = (
    Comparison(
        "guards",
        "Cost of the guards",
        {name: f"supervise=off supervise.incident.enabled=false guards={name}" for name in ("off", "default")},
    ),
    Comparison(
        "supervision",
        "Cost of supervision",
        {
            "off": "supervise=off supervise.ladder.enabled=false supervise.incident.enabled=false",
            "on": "supervise=default",
        },
    ),
    Comparison("physics", "Native physics", {"mjx": "env.backend=mjx", "native": "env.backend=native"}),
)


def compare(comparison: Comparison, name: str, own: Sequence[str], numbers: Iterable[int], console: Console) -> Row:
    """Times one environment in both configurations, a pair per number."""
    settings = [*own, *COMMON]
    sides: dict[str, side.Side] = {}
    with contextlib.ExitStack() as stack:
        for choice, overrides in comparison.sides.items():
            with console.status(f"{name}: compiling {overrides}"):
                started = time.perf_counter()
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                sides[choice] = side.Side([*settings, *overrides.split()], folder)
                stack.callback(sides[choice].close)
            console.print(f"{name}: {overrides} is ready after {time.perf_counter() - started:.1f} s")
        (first, baseline), (second, other) = sides.items()
        seconds, seconds_other = time_in_turn(baseline, other, numbers)
    ratio, low, high = median_and_interval(seconds / seconds_other)
    return {
        "env": name, "settings": settings, "ratio": ratio, "interval": [low, high],
        f"sps_{first}": baseline.steps / float(np.median(seconds)),
        f"sps_{second}": other.steps / float(np.median(seconds_other)),
        "pairs": len(seconds), "steps": baseline.steps, "trips": other.trips,
        f"seconds_{first}": np.round(seconds, 6).tolist(),
        f"seconds_{second}": np.round(seconds_other, 6).tolist(),
    }  # fmt: skip


def time_in_turn(
    first: Callable[[], float], second: Callable[[], float], numbers: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Calls two functions in pairs after a warm-up; in odd pairs the second goes first."""
    for _ in range(WARM_UP):
        first()
        second()
    times = []
    for number in numbers:
        if number % 2:
            late = second()
            times.append((first(), late))
        else:
            times.append((first(), second()))
    return tuple(np.array(times).T)


def median_and_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the median and the ends of its 95 % percentile bootstrap interval, with a fixed seed."""
    rng = np.random.default_rng(0)
    medians = np.median(values[rng.integers(len(values), size=(_RESAMPLES, len(values)))], axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(np.median(values)), float(low), float(high)


def section(comparison: Comparison, rows: list[Row]) -> Section:
    first, second = comparison.sides
    header = ("env", "relative\nspeed", "95 % interval", f"steps/s\n{first}", f"steps/s\n{second}")
    cells, notes = [], []
    for row in rows:
        rates = (f"{row[f'sps_{name}']:,.0f}" for name in (first, second))
        low, high = row["interval"]
        cells.append((row["env"], f"{row['ratio']:.3f}", f"{low:.3f} – {high:.3f}", *rates))
        trips = ", ".join(f"{guard} {count:,}" for guard, count in row["trips"].items()) or "none"
        measured = f"{row['pairs']} pairs, {row['steps']:,} steps a call, trips: {trips}"
        notes.append(f"`{' '.join(row['settings'])}`: {measured}")
    either = " or ".join(f"`{overrides}`" for overrides in comparison.sides.values())
    before = f"Settings, as `python -m rlstable.train` takes them, each followed by {either}:"
    return Section(comparison.name, comparison.title, header, cells, notes, rows, before_notes=before)
