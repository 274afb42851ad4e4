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
# The value that a section compares: measure of its legs, column, name and whether more is better.
COMPARED = {
    NAMES[0]: ("start", "first", "first iteration", False),
    NAMES[1]: ("start", "steady_sps", "steps/s", True),
    NAMES[2]: ("threshold", "seconds", "", False),
}


@dataclasses.dataclass(frozen=True)
class Median:
    """A leg's median over the rounds of a sitting."""

    what: str  # task and value
    side: str  # label of the side
    value: float  # infinite if a threshold was not reached
    ratio: float | None  # how many times better rlstable is, below 1 rlstable is behind; None for rlstable


def spread(values: Sequence[float | None], least: float = math.inf) -> str:
    """Returns the median, and in the next line the range; "–" without measurements."""
    known = [value for value in values if value is not None]
    middle = median(values)

    def show(value: float) -> str:
        return f"> {digits(least)}" if math.isinf(value) else digits(value)

    if middle is None:
        return "–"
    return show(middle) + ("" if len(known) == 1 else f"\n[{show(min(known))}, {show(max(known))}]")


def median(values: Sequence[float | None]) -> float | None:
    """Returns the median of the values that are not None; None without values."""
    known = [value for value in values if value is not None]
    if math.inf in known:
        # The upper of the two middle values, because the mean of a number and infinity is not a time.
        return sorted(known)[len(known) // 2]
    return float(np.median(known)) if known else None


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
        seconds, least = times(rows)
        steps = [row["steps"] for row in rows if row["seconds"] is not None]
        names = (f"{leg.task},\n{leg.threshold:,.0f}", _label(leg).replace(", ", ",\n"))
        numbers = (spread(seconds, least), spread(steps), *(spread(column(rows, n)) for n in ("evaluating", "peak_mb")))
        cells.append((*names, *numbers, f"{len(steps)} of {len(rows)}"))
        endings = ", ".join(f"{name} {count}" for name, count in Counter(row["ending"] for row in rows).items())
        limit = max(row["limit"] for row in rows)
        notes.append(f"{leg.task}, {_label(leg)}: `{leg.text}`: {endings}; limit {limit:,.0f} s")
    title = "From Enter to a return that is worth having"
    return Section(NAMES[2], title, header, cells, notes, every)


def times(rows: Sequence[Row]) -> tuple[list[float], float]:
    """Returns the seconds to a threshold, infinite if it was not reached, and the least time without reaching it."""
    seconds = [math.inf if row["seconds"] is None else row["seconds"] for row in rows]
    return seconds, min((row["ran"] for row in rows if row["seconds"] is None), default=math.inf)


def medians(results: Results, section: str) -> list[Median]:
    """Returns the medians that a section compares; ratios are between the same kind of start and physics."""
    measure, key, name, more = COMPARED[section]
    own = [(leg, rows) for leg, rows in results if leg.measure == measure and not (more and leg.warm)]
    ours = {_key(leg): _median(rows, key) for leg, rows in own if leg.side == "ours"}
    found = []
    for leg, rows in own:
        mine, value = ours.get(_key(leg)), _median(rows, key)
        if value is None:
            continue
        ratio = None
        if leg.side != "ours" and mine and value and not mine == value == math.inf:
            ratio = mine / value if more else value / mine
        found.append(Median(f"{leg.task}, {name or digits(leg.threshold or 0.0)}", _label(leg), value, ratio))
    return found


def _median(rows: Sequence[Row], key: str) -> float | None:
    return median(times(rows)[0] if key == "seconds" else column(rows, key))


def _key(leg: Leg) -> tuple[str, str, bool]:
    """Returns the values that a rival's leg has in common with our leg."""
    return leg.task, leg.case if leg.measure == "start" else "", leg.warm


def behind(found: Sequence[Median]) -> str:
    """Returns a sentence that lists where rlstable is behind; empty without other sides."""
    ratios = [(f"{one.what}: {one.side}", one.ratio) for one in found if one.ratio is not None]
    ahead = "; ".join(f"{name} {ratio:.2f}" for name, ratio in ratios if ratio < 1)
    if ahead:
        return f"rlstable is behind where its speed over the other side's is below 1: {ahead}."
    return "No other side is ahead of rlstable here." if ratios else ""


def sections(results: Results, kind: str, folder: Path) -> list[Section]:
    """Returns the sections for a kind of device, also those without rows, and draws their pictures into a folder."""
    found = []
    versions = {leg.side: row["versions"] for leg, rows in results for row in rows if leg.side in LABELS}
    began = next((row["sitting"] for _, rows in results for row in rows if row.get("sitting")), None)
    for make, draw in ((start_section, draw_start), (speed_section, None), (threshold_section, draw_threshold)):
        section, pictures = make(results), []
        if draw is not None and section.cells:
            name = pages.file_name(section.name.replace("-", "_"), kind)
            draw(results, folder / name)
            pictures = [f"![{section.title.lower()}]({name})"]
        notes = [f"{LABELS[side]} in {', '.join(f'{n} {v}' for n, v in own.items())}" for side, own in versions.items()]
        notes = [*section.notes, *notes]
        before = [f"One sitting, begun {began[:16]} UTC." if began else "", behind(medians(results, section.name))]
        text = "\n\n".join(filter(None, (*before, SETTINGS)))
        found.append(dataclasses.replace(section, notes=notes, pictures=pictures, before_notes=text))
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
