"""The tables and the pictures of the race, from its results."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.race.legs import Leg

Row = dict[str, Any]
Results = Sequence[tuple[Leg, Sequence[Row]]]
LABELS = {"ours": "rlstable", "brax": "Brax PPO", "sb3": "SB3 PPO", "sbx": "SBX PPO", "rsl_rl": "RSL-RL PPO"}
NAMES = ("race-start", "race-speed", "race-threshold")
COLOURS = {"ours": "tab:blue", "brax": "tab:orange", "sb3": "tab:green", "sbx": "tab:red", "rsl_rl": "tab:purple"}
# By case; broken lines are warm runs.
STROKES = {"": "-", "published": "-.", "mjx": ":"}

START_TEXT = """\
Real processes, `python -m rlstable.train` and `brax.training.agents.ppo.train` as published in an environment of its
own (`scripts/rivals/`), with the same task, hyperparameters, networks and steps per iteration, evaluations off, ours
with the guards, supervisor and checkpoints of its defaults. Sides are taken in turn, one process at a time.

On a GPU, cold alone, also RSL-RL's PPO, which learns in PyTorch and steps Brax's environments through MuJoCo
Playground's wrapper, with the same numbers of environments, steps, minibatches and epochs, the same layers, rewards,
discounts, clipping and learning rate, and logs and checkpoints as in Playground. Its own are matrix products in full
float32, where jax takes TF32, minibatches of single steps instead of unrolls, a Gaussian with a deviation that no
observation changes, and what follows an episode that was cut.

Seconds are from the start of the process: *imports*, until everything is imported and the environment made (ours by a
process that does no more); *first iteration*, until the first one is trained, *cold* with nothing compiled before,
*warm* with what an earlier process kept, Brax's by `JAX_COMPILATION_CACHE_DIR`. Memory is the most that a cold process
had in the host, all of it and above what it had after the imports. A cell is the median of the rounds, least and
greatest in brackets."""
SPEED_TEXT = """\
The same processes once they are going, by the median iteration after the second: *learning* is the share of it that is
not collecting. The *floor* is physics alone with random actions, then the learner's matrix products, and nothing else:
1 / (1 / physics + 1 / products), by rates measured here; the share of it is steps/s over that; above 1 the machine was
slower while the floor was measured. A cell is the median of the rounds, cold and warm, least and greatest in
brackets."""
THRESHOLD_TEXT = """\
Seconds from the start of a process, imports and compiling included, until an evaluation of the mean action, of ten
episodes or more, is at the threshold; evaluations are in the time, each side's own. Every side has settings that suit
it: `python -m rlstable.train`, Brax's PPO on Brax's environments, SB3 and SBX on Gymnasium's tasks of that name, which
pay alike but are not the same simulations. Brax's program is as published. In the rows *published* its hyperparameters
are too, made for an accelerator, with an evaluation of ten episodes after every iteration; in its other rows they are
not: batches are cut for few cores (ant, half cheetah), the pendulum's recipe is ours, and for the hopper, where Brax
publishes none, it is one that nobody tuned. The ant and the half cheetah are published for Brax's spring physics; *mjx*
is the cut recipe on the simulation that ours computes natively, another task, in which ants fall more easily
(docs/lab_log.md). SB3's and SBX's are those of RL Baselines3 Zoo, but for the pendulum's.
*Warm*: what it compiles was compiled and kept by a run before. Sides are taken in turn, one process at a time. A cell
is the median of the rounds, least and greatest in brackets; "> 300" is a process that was not there after 300 s, its
time over or all its steps trained."""
SETTINGS = "Settings, all but SB3's and SBX's as `python -m rlstable.train` takes them:"


@dataclasses.dataclass(frozen=True)
class Section:
    """What a report of `scripts/bench.py` is made of; its fields are those of `Report`."""

    name: str
    title: str
    text: str
    header: tuple[str, ...]
    cells: list[tuple[str, ...]]
    notes: list[str]
    rows: list[Row]
    pictures: list[str]


def spread(values: Sequence[float | None], least: float = math.inf) -> str:
    """The median, and in a line below it the range; "–" where nothing was measured.

    Args:
        values: One per round; infinity for what did not happen.
        least: The time in which what did not happen had not happened.
    """
    known = [value for value in values if value is not None]

    def show(value: float) -> str:
        return f"> {digits(least)}" if math.isinf(value) else digits(value)

    if not known:
        return "–"
    # By rank, since the mean of a number and infinity is no time: the later one of the middle two.
    middle = sorted(known)[len(known) // 2] if math.inf in known else float(np.median(known))
    return show(middle) + ("" if len(known) == 1 else f"\n[{show(min(known))}, {show(max(known))}]")


def digits(value: float) -> str:
    """Three of them, or all of a larger whole number."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    """One number per round."""
    return [row.get(name) for row in rows]


def cold_and_warm(results: Results) -> list[tuple[Leg, Sequence[Row], Sequence[Row]]]:
    """The starts that were measured: the cold leg, its rows and those of the warm one."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "start"]
    warm = {(leg.task, leg.side, leg.case): rows for leg, rows in own if leg.warm}
    pairs = [(leg, rows, warm.get((leg.task, leg.side, leg.case), ())) for leg, rows in own if not leg.warm]
    return [(leg, rows, again) for leg, rows, again in pairs if rows or again]


def start_section(results: Results) -> Section:
    """How sides get going."""
    header = (
        "task",
        "side",
        "imports",
        "first iteration,\ncold",
        "first iteration,\nwarm",
        "peak MB",
        "above\nimports",
    )
    cells, notes = [], []
    for leg, rows, again in cold_and_warm(results):
        numbers = [spread(column(rows, name)) for name in ("imports", "first", "peak_mb", "above_imports_mb")]
        numbers.insert(2, spread(column(again, "first")))
        cells.append((leg.task, _label(leg), *numbers))
        iterations = max(row["iterations"] for row in (*rows, *again))
        count = f"{len(rows)} cold and {len(again)} warm, {iterations} iterations"
        notes.append(f"{leg.task}, {_label(leg)}: `{leg.text}`, {count}")
    every = [row for leg, rows in results if leg.measure == "start" for row in rows]
    return Section(NAMES[0], "From Enter to the first iteration", START_TEXT, header, cells, notes, every, [])


def speed_section(results: Results) -> Section:
    """How quick they are then, beside what could be."""
    header = ("task", "side", "steps/s", "learning", "share of\nthe floor")
    floors = {(leg.task, leg.case): rows for leg, rows in results if leg.measure == "floor" and rows}
    cells, notes = [], []
    for leg, rows, again in cold_and_warm(results):
        rates = [rate for rate in column((*rows, *again), "steady_sps") if rate is not None]
        floor = column(floors.get((leg.task, leg.case), []), "floor_sps")
        shares = [rate / np.median(floor) for rate in rates if floor]
        learning = column((*rows, *again), "learning_share")
        cells.append((leg.task, _label(leg), spread(rates), spread(learning), spread(shares)))
    for (task, case), rows in floors.items():
        names = ("floor_sps", "physics_sps", "learner_sps", "gflops")
        rates = [spread(column(rows, name)).replace("\n", " ") for name in names]
        told = "floor {} steps/s: physics {}, learner {} at {} GFLOP/s".format(*rates)
        notes.append(f"{', '.join(filter(None, (task, case)))}: {told}")
    every = [row for leg, rows in results if leg.measure == "floor" for row in rows]
    return Section(NAMES[1], "Steady training", SPEED_TEXT, header, cells, notes, every, [])


def threshold_section(results: Results) -> Section:
    """Who reaches a return when."""
    header = ("task", "side", "seconds", "steps", "evals,\nseconds", "peak\nMB", "reached")
    cells, notes, every = [], [], []
    for leg, rows in results:
        if leg.measure != "threshold" or not rows:
            continue
        every += rows
        seconds = [math.inf if row["seconds"] is None else row["seconds"] for row in rows]
        least = min((row["ran"] for row in rows if row["seconds"] is None), default=math.inf)
        steps = [row["steps"] for row in rows if row["seconds"] is not None]
        names = (f"{leg.task},\n{leg.threshold:,.0f}", _label(leg).replace(", ", ",\n"))
        numbers = (spread(seconds, least), spread(steps), *(spread(column(rows, n)) for n in ("evaluating", "peak_mb")))
        cells.append((*names, *numbers, f"{len(steps)} of {len(rows)}"))
        endings = [row["ending"] for row in rows]
        told = ", ".join(f"{name} {endings.count(name)}" for name in dict.fromkeys(endings))
        notes.append(
            f"{leg.task}, {_label(leg)}: `{leg.text}`: {told}; limit {max(row['limit'] for row in rows):,.0f} s"
        )
    title = "From Enter to a return that is worth having"
    return Section(NAMES[2], title, THRESHOLD_TEXT, header, cells, notes, every, [])


def sections(results: Results, kind: str, folder: Path) -> list[Section]:
    """What is on the page of benchmarks for a device, and its pictures beside it; those that have a line.

    Args:
        results: Every leg and its rows.
        kind: Of the device.
        folder: Of the page.
    """
    found = []
    versions = {leg.side: row["versions"] for leg, rows in results for row in rows if leg.side in LABELS}
    for make, draw in ((start_section, draw_start), (speed_section, None), (threshold_section, draw_threshold)):
        section, pictures = make(results), []
        if not section.cells:
            continue
        if draw is not None:
            name = f"{section.name.replace('-', '_')}_{re.sub('[^a-z0-9]+', '_', kind.lower())}.png"
            _draw(draw, results, folder / name)
            pictures = [f"![{section.title.lower()}]({name})"]
        notes = [f"{LABELS[side]} in {_list(own)}" for side, own in versions.items()]
        found.append(dataclasses.replace(section, notes=[*section.notes, *notes], pictures=pictures))
    return found


def _label(leg: Leg) -> str:
    kind = ", ".join(filter(None, (leg.case, "warm" if leg.warm else "")))
    return LABELS[leg.side] + (f", {kind}" if kind else "")


def _list(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _draw(draw: Callable[[Any, Results], Any], results: Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = draw(plt, results)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def draw_start(plt: Any, results: Results) -> Any:
    """A bar per leg: seconds to the first iteration, of them the imports."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "start" and any(row["first"] for row in rows)]
    tasks = list(dict.fromkeys(leg.task for leg, _ in own))
    figure, panels = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks), 2.6), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        bars = [(leg, rows) for leg, rows in own if leg.task == task][::-1]
        firsts = [np.median([row["first"] for row in rows if row["first"]]) for _, rows in bars]
        imports = [np.median(column(rows, "imports")) for _, rows in bars]
        labels, colours = [_label(leg) for leg, _ in bars], [COLOURS[leg.side] for leg, _ in bars]
        axes.barh(labels, firsts, color=colours, alpha=0.75)
        axes.barh(labels, imports, color="black", alpha=0.35)
        axes.set_title(task, fontsize=9)
        _plain(axes, "seconds to the first iteration, dark: imports")
    figure.tight_layout()
    return figure


def draw_threshold(plt: Any, results: Results) -> Any:
    """A panel per task: the return of every process over the seconds since it was started."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "threshold" and rows]
    tasks = list(dict.fromkeys(leg.task for leg, _ in own))
    figure, panels = plt.subplots(1, len(tasks), figsize=(3.4 * len(tasks), 2.8), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for leg, rows in own:
            if leg.task != task:
                continue
            axes.axhline(leg.threshold, color="grey", linewidth=0.8, linestyle=":")
            line = "--" if leg.warm else STROKES[leg.case]
            style = {"color": COLOURS[leg.side], "linestyle": line, "linewidth": 1.1}
            for number, row in enumerate(row for row in rows if row["curve"]):
                seconds, _, returns = np.array(row["curve"], dtype=float).T
                axes.plot(seconds, returns, alpha=0.8, label=None if number else _label(leg), **style)
                axes.plot(seconds[-1], returns[-1], "x" if row["seconds"] is None else "o", color=style["color"], ms=4)
        axes.set_title(task, fontsize=9)
        axes.set_xscale("log", subs=(2, 5))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.xaxis.set_minor_formatter("{x:,g}")
        axes.legend(fontsize=6, frameon=False)
        _plain(axes, "seconds since the start of the process")
    panels[0][0].set_ylabel("return, every process", fontsize=8)
    return figure


def _plain(axes: Any, label: str) -> None:
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=7, which="both")
    axes.spines[["top", "right"]].set_visible(False)
