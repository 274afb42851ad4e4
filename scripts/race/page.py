"""The tables and pictures of the race, from its results."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts import pages
from scripts.pages import Section
from scripts.race.legs import Leg
from scripts.results import Row

Results = Sequence[tuple[Leg, Sequence[Row]]]
LABELS = {"ours": "rlstable", "brax": "Brax PPO", "sb3": "SB3 PPO", "sbx": "SBX PPO", "rsl_rl": "RSL-RL PPO"}
NAMES = ("race-start", "race-speed", "race-threshold")
COLOURS = {"ours": "tab:blue", "brax": "tab:orange", "sb3": "tab:green", "sbx": "tab:red", "rsl_rl": "tab:purple"}
# Line styles by case; warm runs are dashed.
STROKES = {"": "-", "published": "-.", "mjx": ":"}

SETTINGS = "Settings, all but SB3's and SBX's as `python -m rlstable.train` takes them:"


def spread(values: Sequence[float | None], least: float = math.inf) -> str:
    """Returns the median, and in the next line the range; "–" without measurements."""
    known = [value for value in values if value is not None]

    def show(value: float) -> str:
        return f"> {digits(least)}" if math.isinf(value) else digits(value)

    if not known:
        return "–"
    # The upper of the two middle values, because the mean of a number and infinity is not a time.
    middle = sorted(known)[len(known) // 2] if math.inf in known else float(np.median(known))
    return show(middle) + ("" if len(known) == 1 else f"\n[{show(min(known))}, {show(max(known))}]")


def digits(value: float) -> str:
    """Returns a number with three digits, or a large number as a whole number."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def column(rows: Sequence[Row], name: str) -> list[float | None]:
    return [row.get(name) for row in rows]


def cold_and_warm(results: Results) -> list[tuple[Leg, Sequence[Row], Sequence[Row]]]:
    """Returns the measured starts: the cold leg, its rows and the rows of the warm leg."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "start"]
    warm = {(leg.task, leg.side, leg.case): rows for leg, rows in own if leg.warm}
    pairs = [(leg, rows, warm.get((leg.task, leg.side, leg.case), ())) for leg, rows in own if not leg.warm]
    return [(leg, rows, again) for leg, rows, again in pairs if rows or again]


def start_section(results: Results) -> Section:
    firsts = ("first iteration,\ncold", "first iteration,\nwarm")
    header = ("task", "side", "imports", *firsts, "peak MB", "above\nimports")
    cells, notes = [], []
    for leg, rows, again in cold_and_warm(results):
        numbers = [spread(column(rows, name)) for name in ("imports", "first", "peak_mb", "above_imports_mb")]
        numbers.insert(2, spread(column(again, "first")))
        cells.append((leg.task, _label(leg), *numbers))
        iterations = max(row["iterations"] for row in (*rows, *again))
        count = f"{len(rows)} cold and {len(again)} warm, {iterations} iterations"
        notes.append(f"{leg.task}, {_label(leg)}: `{leg.text}`, {count}")
    every = [row for leg, rows in results if leg.measure == "start" for row in rows]
    return Section(NAMES[0], "From Enter to the first iteration", header, cells, notes, every)


def speed_section(results: Results) -> Section:
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
        text = "floor {} steps/s: physics {}, learner {} at {} GFLOP/s".format(*rates)
        notes.append(f"{', '.join(filter(None, (task, case)))}: {text}")
    every = [row for rows in floors.values() for row in rows]
    return Section(NAMES[1], "Steady training", header, cells, notes, every)


def threshold_section(results: Results) -> Section:
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
        endings = ", ".join(f"{name} {count}" for name, count in Counter(row["ending"] for row in rows).items())
        limit = max(row["limit"] for row in rows)
        notes.append(f"{leg.task}, {_label(leg)}: `{leg.text}`: {endings}; limit {limit:,.0f} s")
    title = "From Enter to a return that is worth having"
    return Section(NAMES[2], title, header, cells, notes, every)


def sections(results: Results, kind: str, folder: Path) -> list[Section]:
    """Returns the sections that have rows for a kind of device, and draws their pictures into the page's folder."""
    found = []
    versions = {leg.side: row["versions"] for leg, rows in results for row in rows if leg.side in LABELS}
    for make, draw in ((start_section, draw_start), (speed_section, None), (threshold_section, draw_threshold)):
        section, pictures = make(results), []
        if not section.cells:
            continue
        if draw is not None:
            name = pages.file_name(section.name.replace("-", "_"), kind)
            draw(results, folder / name)
            pictures = [f"![{section.title.lower()}]({name})"]
        notes = [f"{LABELS[side]} in {', '.join(f'{n} {v}' for n, v in own.items())}" for side, own in versions.items()]
        notes = [*section.notes, *notes]
        found.append(dataclasses.replace(section, notes=notes, pictures=pictures, before_notes=SETTINGS))
    return found


def _label(leg: Leg) -> str:
    return ", ".join(filter(None, (LABELS[leg.side], leg.case, "warm" if leg.warm else "")))


def draw_start(results: Results, path: Path) -> None:
    """Draws a bar per leg: seconds to the first iteration, with the imports dark."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "start" and any(row["first"] for row in rows)]
    tasks = list(dict.fromkeys(leg.task for leg, _ in own))
    with pages.picture(path, ncols=len(tasks), figsize=(3.2 * len(tasks), 2.6), squeeze=False) as (figure, panels):
        for axes, task in zip(panels[0], tasks, strict=True):
            bars = [(leg, rows) for leg, rows in own if leg.task == task][::-1]
            firsts = [np.median([row["first"] for row in rows if row["first"]]) for _, rows in bars]
            imports = [np.median(column(rows, "imports")) for _, rows in bars]
            labels, colours = [_label(leg) for leg, _ in bars], [COLOURS[leg.side] for leg, _ in bars]
            axes.barh(labels, firsts, color=colours, alpha=0.75)
            axes.barh(labels, imports, color="black", alpha=0.35)
            axes.set_title(task, fontsize=9)
            pages.plain(axes, "seconds to the first iteration, dark: imports", 7)
        figure.tight_layout()


def draw_threshold(results: Results, path: Path) -> None:
    """Draws a panel per task: the return of every process over the seconds since its start."""
    own = [(leg, rows) for leg, rows in results if leg.measure == "threshold" and rows]
    tasks = list(dict.fromkeys(leg.task for leg, _ in own))
    with pages.picture(path, ncols=len(tasks), figsize=(3.4 * len(tasks), 2.8), squeeze=False) as (_, panels):
        for axes, task in zip(panels[0], tasks, strict=True):
            for leg, rows in own:
                if leg.task == task:
                    _draw_leg(axes, leg, rows)
            axes.set_title(task, fontsize=9)
            axes.set_xscale("log", subs=(2, 5))
            axes.xaxis.set_major_formatter("{x:,g}")
            axes.xaxis.set_minor_formatter("{x:,g}")
            axes.legend(fontsize=6, frameon=False)
            pages.plain(axes, "seconds since the start of the process", 7)
        panels[0][0].set_ylabel("return, every process", fontsize=8)


def _draw_leg(axes: Any, leg: Leg, rows: Sequence[Row]) -> None:
    axes.axhline(leg.threshold, color="grey", linewidth=0.8, linestyle=":")
    style = {"color": COLOURS[leg.side], "linestyle": "--" if leg.warm else STROKES[leg.case], "linewidth": 1.1}
    for number, row in enumerate(row for row in rows if row["curve"]):
        seconds, _, returns = np.array(row["curve"], dtype=float).T
        axes.plot(seconds, returns, alpha=0.8, label=None if number else _label(leg), **style)
        axes.plot(seconds[-1], returns[-1], "x" if row["seconds"] is None else "o", color=style["color"], ms=4)
