"""The page and the picture of the survival matrix, from its results."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scripts import pages
from scripts.faulted import SIDES
from scripts.results import Row, matching

TASKS = {"generalized": "inverted pendulum, generalized", "mjx": "inverted pendulum, MJX", "point_mass": "point mass"}
ALIKE = {"mjx": "generalized"}  # the table of the first task has only the rows that differ from the second task's
ENOUGH, TOO_LITTLE = 0.95, 0.8  # shares of the clean return: green from the first on, red below the second
RED, AMBER, GREEN = range(3)
_COLOURS = ("#e8705f", "#fdd17a", "#79bf76")
_IMPOSSIBLE, _NOT_MEASURED = "n/a", ""


def cell(rows: Sequence[Row], clean: float, possible: bool = True) -> tuple[str, int | None]:
    """Returns the text of a cell and its colour: `RED`, `AMBER` or `GREEN`; None for a cell without a measurement."""
    if not possible:
        return _IMPOSSIBLE, None
    if not rows or not np.isfinite(clean):
        return _NOT_MEASURED, None
    shares = [0.0 if row["return"] is None else row["return"] / clean for row in rows]
    least = min(shares)
    text = f"{np.median(shares):.2f} / {least:.2f}"
    if not all(row.get("finite", row["return"] is not None) for row in rows):
        return f"**nan** {text}", RED
    if not all(row.get("finished", True) for row in rows):
        return f"**stopped** {text}", RED
    if least >= ENOUGH:
        return text, GREEN
    return text, AMBER if least >= TOO_LITTLE else RED


def trips(rows: Sequence[Row]) -> str:
    names = sorted({name for row in rows for name in row["trips"]})
    return ", ".join(f"{name} {np.median([row['trips'].get(name, 0) for row in rows]):,.0f}" for name in names)


def write(rows: Sequence[Row], cases: Sequence[str], results: Path, possible: Callable[[str, str, str], bool]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        return
    by = {(t, s, c): matching(rows, task=t, side=s, case=c) for t in tasks for s in SIDES for c in cases}
    columns = [(task, side) for task in tasks for side in SIDES if any(by[task, side, case] for case in cases)]
    clean = {key: [row["return"] or 0.0 for row in by[*key, "clean"]] for key in columns}
    median = {key: float(np.median(values)) if any(values) else np.nan for key, values in clean.items()}
    drawn = {(*key, case): cell(by[*key, case], median[key], possible(*key, case)) for key in columns for case in cases}
    lines = []
    for task in tasks:
        sides = [side for own, side in columns if own == task]
        header = ("fault", *(SIDES[side] for side in sides), "tripped")
        measured = [case for case in cases if any(by[task, side, case] for side in sides)]
        shown = {case: [drawn[task, side, case][0] for side in sides] for case in measured}
        lines += [f"## {TASKS.get(task, task)}", ""]
        base = ALIKE.get(task)
        if base in tasks:
            known = {key: drawn.get((base, *key), ("", None))[0] for key in itertools.product(sides, shown)}
            shown = {
                case: texts
                for case, texts in shown.items()
                if any(text not in ("", known[side, case]) for side, text in zip(sides, texts, strict=True))
            }
            lines += [f"A fault that is not in this table has the shares of {TASKS[base]}, where it was measured.", ""]
        cells = pages.merged([(case, *texts, trips(by[task, "default", case])) for case, texts in shown.items()])
        lines += [*pages.table(header, cells, (0, len(header) - 1)), ""]
    own = {key: one for key, one in drawn.items() if key[1] == "default" and key[2] != "clean" and one[1] is not None}
    rest: dict[str, list[str]] = {}  # cases that are not green
    for (task, _, case), (text, colour) in own.items():
        if colour != GREEN:
            rest.setdefault(f"{TASKS.get(task, task)}, {text}", []).append(case)
    green = len(own) - sum(map(len, rest.values()))
    named = [f"- {about}: {', '.join(cases)}" for about, cases in rest.items()]
    text = f"With the default guards, {green} of {len(own)} faults are green: least seed {ENOUGH} or more. The others:"
    summary = [text, "", *named]
    parts = {"results": "\n".join([*lines, pages.machine()]), "rest": "\n".join(summary)}
    pages.fill(results.parent / "survival.md", parts)
    titles = [f"{SIDES[side]}\n" + TASKS.get(task, task).replace(", ", "\n") for task, side in columns]
    matrix = [[drawn[*key, case] for key in columns] for case in cases]
    _draw(matrix, cases, titles, results.parent / "survival.png")


def _draw(
    matrix: Sequence[Sequence[tuple[str, int | None]]], cases: Sequence[str], columns: Sequence[str], path: Path
) -> None:
    from matplotlib.colors import to_rgb

    def shade(text: str, colour: int | None) -> tuple[float, float, float]:
        return to_rgb(("#eeeeee" if text == _IMPOSSIBLE else "white") if colour is None else _COLOURS[colour])

    with pages.picture(path, figsize=(2.5 + 1.35 * len(columns), 0.3 * len(cases) + 1.4)) as (_, axes):
        axes.imshow([[shade(*own) for own in row] for row in matrix], aspect="auto")
        for row, cells in enumerate(matrix):
            for column, (text, colour) in enumerate(cells):
                weight = "bold" if colour == GREEN else "normal"
                axes.text(column, row, text.replace("*", ""), ha="center", va="center", fontsize=8, weight=weight)
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_yticks(range(len(cases)), cases, fontsize=8)
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        # White lines separate neighbouring cells of one colour.
        axes.set_xticks(np.arange(len(columns) - 1) + 0.5, minor=True)
        axes.set_yticks(np.arange(len(cases) - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=1.0)
        axes.tick_params(which="minor", length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        title = (
            "median / least return of the seeds, as a share of the clean training's\n"
            f"green: least {ENOUGH} or more, amber: {TOO_LITTLE} or more, red: below, not finite or stopped"
        )
        axes.set_title(title, fontsize=9, pad=12)
