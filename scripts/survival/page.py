"""The tables of faults on docs/survival.md, from their results."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scripts import pages
from scripts.faulted import SIDES
from scripts.results import Row, matching

TASKS = {"generalized": "inverted pendulum, generalized", "mjx": "inverted pendulum, MJX", "point_mass": "point mass"}
ALIKE = {"mjx": "generalized"}  # the table of the first task has only the rows that differ from the second task's
ENOUGH = 0.95  # share of the clean return; a fault whose least seed has it is green


def cell(rows: Sequence[Row], clean: float) -> tuple[str, bool]:
    """Returns the text of a cell, empty without a measurement, and whether it is green."""
    if not rows or not np.isfinite(clean):
        return "", False
    shares = [0.0 if row["return"] is None else row["return"] / clean for row in rows]
    text = f"{np.median(shares):.2f} / {min(shares):.2f}"
    if not all(row.get("finite", row["return"] is not None) for row in rows):
        return f"**nan** {text}", False
    if not all(row.get("finished", True) for row in rows):
        return f"**stopped** {text}", False
    return text, min(shares) >= ENOUGH


def trips(rows: Sequence[Row]) -> str:
    names = sorted({name for row in rows for name in row["trips"]})
    return ", ".join(f"{name} {np.median([row['trips'].get(name, 0) for row in rows]):,.0f}" for name in names)


def write(rows: Sequence[Row], cases: Sequence[str], results: Path, possible: Callable[[str, str, str], bool]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    by = {key: matching(rows, **dict(zip(("task", "side", "case"), key, strict=True)))
          for key in itertools.product(tasks, SIDES, cases)}  # fmt: skip
    columns = [(task, side) for task in tasks for side in SIDES if any(by[task, side, case] for case in cases)]
    clean = {key: [row["return"] or 0.0 for row in by[*key, "clean"]] for key in columns}
    median = {key: float(np.median(values)) if any(values) else np.nan for key, values in clean.items()}
    shown = {
        (*key, case): cell(by[*key, case], median[key]) if possible(*key, case) else ("n/a", False)
        for key in columns
        for case in cases
    }
    lines = []
    for task in tasks:
        sides = [side for own, side in columns if own == task]
        lines += [f"## {TASKS.get(task, task)}", ""]
        measured = [case for case in cases if any(by[task, side, case] for side in sides)]
        base = ALIKE.get(task)
        if base in tasks:
            lines += [f"A fault that is not in this table has the shares of {TASKS[base]}, where it was measured.", ""]
            known = {key: shown.get((base, *key), ("", False))[0] for key in itertools.product(sides, cases)}
            pairs = {case: [(shown[task, side, case][0], known[side, case]) for side in sides] for case in measured}
            measured = [case for case, texts in pairs.items() if any(text not in ("", own) for text, own in texts)]
        texts = [
            (case, *(shown[task, side, case][0] for side in sides), trips(by[task, "default", case]))
            for case in measured
        ]
        header = ("fault", *(SIDES[side] for side in sides), "tripped")
        lines += [*pages.table(header, pages.merged(texts), (0, len(header) - 1)), ""]
    own = {key: one for key, one in shown.items() if by[key] and key[1] == "default" and key[2] != "clean"}
    rest: dict[str, list[str]] = {}
    for (task, _, case), (text, green) in own.items():
        if not green:
            rest.setdefault(f"{TASKS.get(task, task)}, {text}", []).append(case)
    count = sum(green for _, green in own.values())
    summary = (
        f"With the default guards, {count} of {len(own)} faults are green: least seed {ENOUGH} or more. The others:"
    )
    others = [f"- {about}: {', '.join(names)}" for about, names in rest.items()]
    parts = {"results": "\n".join(lines).rstrip(), "rest": "\n".join([summary, "", *others])}
    pages.fill(results.parent / "survival.md", parts)
