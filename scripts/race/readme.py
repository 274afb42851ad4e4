"""The README's table of costs: the seconds to a return, from the newest sitting that has every side."""

import math
from collections.abc import Sequence
from pathlib import Path

from scripts import pages, results
from scripts.race.page import digits, median, times
from scripts.race.tasks import FIRST, THRESHOLD, is_whole
from scripts.results import Row

MARKER = "what it costs"
LABELS = {
    ("ours", ""): "rlstable",
    ("brax", ""): "Brax PPO, our recipe, its cheapest physics",
    ("brax", "published"): "Brax PPO, published settings",
    ("sb3", ""): "SB3 PPO, Gymnasium's pendulum",
    ("sbx", ""): "SBX PPO, Gymnasium's pendulum",
}


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replaces the table between its markers; without a complete sitting or without markers the text stays."""
    own = results.matching(rows, measure="threshold", task=FIRST)
    own = [row for row in own if is_whole(row, THRESHOLD[FIRST].limit)]
    sittings = sorted({row["sitting"] for row in own if row.get("sitting")}, reverse=True)
    table = next(filter(None, (_table(results.matching(own, sitting=sitting)) for sitting in sittings)), "")
    if table and path.exists() and f"<!-- {MARKER} -->" in path.read_text():
        pages.fill(path, {MARKER: table})


def _table(rows: Sequence[Row]) -> str:
    """Returns a paragraph and the table of a sitting; empty if a side has no first start."""
    starts = {
        key: [results.matching(rows, side=key[0], case=key[1], warm=warm) for warm in (False, True)] for key in LABELS
    }
    if not all(cold for cold, _ in starts.values()):
        return ""
    lines, ahead = [], []
    for key, both in starts.items():
        evaluating = median([row["evaluating"] for row in both[0]]) or 0.0
        line = [f"{LABELS[key]}, {evaluating:.1f} s of it evaluations"]
        for start, own, ours in zip(("first", "later"), both, starts["ours", ""], strict=True):
            text, ratio = _compared(own, ours)
            line += [text, "" if ratio is None else digits(ratio)]
            if ratio is not None and ratio < 1:
                ahead.append(f"{LABELS[key]} {digits(ratio)} at the {start} start")
        lines.append(line)
    header = ("side", "first start", "ratio", "later start", "ratio")
    return "\n".join([*_paragraph(rows, ahead), "", *pages.table(header, lines)])


def _compared(rows: Sequence[Row], ours: Sequence[Row]) -> tuple[str, float | None]:
    """Returns the median seconds of a side as text, and their ratio to ours if both reached the return."""
    seconds, least = times(rows)
    theirs, mine = median(seconds), median(times(ours)[0])
    if theirs is None:
        return "", None
    ratio = theirs / mine if mine is not None and max(theirs, mine) < math.inf else None
    return (f"> {digits(least)} s" if theirs == math.inf else f"{digits(theirs)} s"), ratio


def _paragraph(rows: Sequence[Row], ahead: Sequence[str]) -> list[str]:
    device, rounds = rows[0]["device"], max(row["round"] for row in rows)
    processes = "One process per cell" if rounds == 1 else f"Medians of up to {rounds} processes in turn"
    return [
        f"Seconds from Enter to a return of {THRESHOLD[FIRST].threshold:,.0f} on the inverted pendulum, with imports, "
        "compiling and each side's evaluations.",
        f"{processes}, in one sitting on {device['kind']} with {device['cpus']} CPUs, begun {rows[0]['sitting'][:10]}.",
        "Ratios are to rlstable; a blank cell was not measured. SB3 compiles nothing, so that it has no later start.",
        f"A ratio below 1 means that the side is faster: {'; '.join(ahead)}." if ahead else "No side is faster.",
        "`make race MINUTES=90` measures this table, and [docs/benchmarks.md](docs/benchmarks.md) has the rest.",
    ]
