"""The tables of docs/benchmarks.md, a part per platform, and the table of the README."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from scripts import pages, results
from scripts.bench.tasks import MEASURES, SIDES
from scripts.results import Row

LABELS = {"ours": "rlstable", "brax": "Brax PPO", "sb3": "SB3 PPO", "sbx": "SBX PPO"}
COSTS = "what it costs"
COMPARED = ("hopper", "halfcheetah", "ant")
LIMIT = ("iteration, ms", "physics", "inference", "plain SGD", "share of the limit")
Cells = list[tuple[str, ...]]


def median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # Of infinite times the upper of the two middle values, because the mean of a number and infinity is not a time.
    middle = statistics.median_high if math.inf in known else statistics.median
    return float(middle(known)) if known else None


def digits(value: float) -> str:
    """Returns a number with three digits, or a large number as a whole number."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def spread(values: Iterable[float | None], least: float = math.inf) -> str:
    """Returns the median and the range; empty without values. Infinity is shown as more than `least`."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    numbers = (median(known) or 0.0, min(known), max(known))
    middle, *ends = (f"> {digits(least)}" if math.isinf(value) else digits(value) for value in numbers)
    return middle + ("" if len(known) == 1 else f" [{', '.join(ends)}]")


def times(rows: Sequence[Row]) -> tuple[list[float], float]:
    """Returns the seconds to a threshold, infinite if it was not reached, and the least time without reaching it."""
    seconds = [math.inf if row["seconds"] is None else row["seconds"] for row in rows]
    return seconds, min((row["ran"] for row in rows if row["seconds"] is None), default=math.inf)


def sides_of(rows: Sequence[Row]) -> dict[tuple[str, str, bool], list[Row]]:
    order = sorted({(row["warm"], SIDES.index(row["side"]), row["case"]) for row in rows})
    keys = [(SIDES[side], case, warm) for warm, side, case in order]
    return {(s, c, w): results.matching(rows, side=s, case=c, warm=w) for s, c, w in keys}


def label(side: str, case: str, warm: bool = False) -> str:
    return ", ".join(filter(None, (LABELS[side], case, "warm" if warm else "")))


def threshold_cells(task: str, rows: Sequence[Row]) -> Cells:
    cells, by = [], sides_of(rows)
    for (side, case, warm), own in by.items():
        seconds, least = times(own)
        steps = [row["steps"] for row in own if row["seconds"] is not None]
        ours, mine = median(times(by.get(("ours", "", warm), []))[0]), median(seconds)
        ratio = digits(mine / ours) if ours and mine and max(ours, mine) < math.inf else ""
        evaluating, peak = (spread([median([row.get(name) for row in own])]) for name in ("evaluating", "peak_mb"))
        numbers = (spread(seconds, least), ratio, spread([median(steps)]), evaluating, peak)
        goal = f"{task}, {own[0]['threshold']:,.0f}"
        cells.append((goal, label(side, case, warm), *numbers, f"{len(steps)} of {len(own)}"))
    return cells


def start_cells(task: str, rows: Sequence[Row]) -> Cells:
    cells, by = [], sides_of(rows)
    for side, case in dict.fromkeys((side, case) for side, case, _ in by):
        cold, warm = by.get((side, case, False), []), by.get((side, case, True), [])
        shown = ((cold, "first"), (warm, "first"), ([*cold, *warm], "steady_sps"), (cold, "peak_mb"))
        cells.append((task, label(side, case), *(spread(row.get(name) for row in own) for own, name in shown)))
    return cells


def guards_cells(task: str, rows: Sequence[Row]) -> Cells:
    cells = []
    for row in {row["case"]: row for row in rows}.values():
        rates = (f"{row[f'sps_{side}']:,.0f}" for side in ("off", "default"))
        iteration = 1e3 * row["steps"] / row["sps_default"]
        parts = [digits(row[f"{name}_ms"]) if "share" in row else "" for name in ("physics", "inference", "sgd")]
        share = f"{row['share']:.2f}" if "share" in row else ""
        low, high = row["interval"]
        name = ", ".join(filter(None, (task, row["case"])))
        cells.append((name, f"{row['ratio']:.3f}", f"{low:.3f} – {high:.3f}", *rates, digits(iteration), *parts, share))
    return cells


TABLES: dict[str, tuple[tuple[str, ...], Callable[[str, Sequence[Row]], Cells]]] = {
    "threshold": (
        ("task, return", "side", "seconds", "ratio", "steps", "of it evaluations, s", "peak MB", "reached"),
        threshold_cells,
    ),
    "start": (("task", "side", "first iteration, s", "warm, s", "then steps/s", "peak MB"), start_cells),
    "guards": (
        ("task", "relative speed", "95 % interval", "steps/s off", "steps/s default", *LIMIT),
        guards_cells,
    ),
}


def part(rows: Sequence[Row], measure: str) -> str:
    """Returns the table of a measure: every task in its newest sitting, so that its sides are of one machine."""
    header, cells_of = TABLES[measure]
    cells, about = [], []
    for task in MEASURES[measure]:
        own = results.matching(rows, measure=measure, task=task)
        if not own:
            continue
        newest = results.matching(own, sitting=max(row["sitting"] for row in own))
        cells += cells_of(task, newest)
        device = newest[0]["device"]
        about.append(f"{device['kind']}, {device['cpus']} CPUs, begun {newest[0]['sitting'][:10]}")
    lines = pages.table(header, cells, (0,) if measure == "guards" else (0, 1))
    return "\n".join([*lines, "", f"Measured on {'; '.join(dict.fromkeys(about))}."])


def write(rows: Sequence[Row], page: Path, readme: Path) -> None:
    """Replaces the parts that have rows, and the README's table if a task has all of its sides."""
    rows = [row for row in rows if row.get("sitting")]
    parts = {}
    for platform in sorted({row["device"]["platform"] for row in rows}):
        own = [row for row in rows if row["device"]["platform"] == platform]
        for measure in MEASURES:
            if results.matching(own, measure=measure):
                parts[f"{measure} on {platform}"] = part(own, measure)
    pages.fill(page, parts)
    table = costs(rows)
    if table and readme.exists() and f"<!-- {COSTS} -->" in readme.read_text():
        pages.fill(readme, {COSTS: table})


def costs(rows: Sequence[Row]) -> str:
    """Returns the README's paragraph and table, of tasks whose newest sitting has every side; empty without a task."""
    lines, devices, least = [], [], []
    for task in COMPARED:
        own = results.matching(rows, measure="threshold", task=task, warm=False)
        if not own:
            continue
        by = sides_of(results.matching(own, sitting=max(row["sitting"] for row in own)))
        fastest = []
        for side in LABELS:
            cases = [times(found) for (name, _, _), found in by.items() if name == side]
            if cases:
                seconds, ran = min(cases, key=lambda case: median(case[0]) or math.inf)
                fastest.append(spread(seconds, ran))
        if len(fastest) == len(LABELS):
            (goal,) = {row["threshold"] for row in own}
            lines.append((f"{task}, {goal:,.0f}", *fastest))
            devices.append(own[-1]["device"])
    if not lines:
        return ""
    for task in MEASURES["guards"]:
        measured = results.matching(rows, measure="guards", task=task, case="", device=devices[0])
        least += [100 * (1 - row["ratio"]) for row in measured if row["sitting"] == measured[-1]["sitting"]]
    cost = f"; guards take {min(least):.0f} to {max(least):.0f} % of the speed of training" if least else ""
    machine = f"{devices[0]['kind']} with {devices[0]['cpus']} CPUs"
    text = f"Seconds from Enter to an evaluated return, with imports and compiling, on {machine}{cost}."
    more = "Brackets: least and greatest of three. A rival's time is that of its fastest settings ([benchmarks]"
    more += "(docs/benchmarks.md)); `make race` measures again."
    return "\n".join([text, more, "", *pages.table(("task, return", *LABELS.values()), lines)])
