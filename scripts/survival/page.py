"""The page and the picture of the survival matrix, from its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from scripts import pages
from scripts.results import Row, matching

SIDES = ("off", "default", "brax")
TITLES = {"off": "guards=off", "default": "guards=default", "brax": "Brax PPO"}
TASKS = {"generalized": "inverted pendulum, generalized", "mjx": "inverted pendulum, MJX", "point_mass": "point mass"}
ENOUGH, TOO_LITTLE = 0.95, 0.8  # shares of the clean return: green from the first on, red below the second
RED, AMBER, GREEN = range(3)
_COLOURS = ("#e8705f", "#fdd17a", "#79bf76")
_IMPOSSIBLE, _NOT_MEASURED = "n/a", ""
_INTRODUCTION = """# What a training survives

Written by `make survival` (`scripts/survival/`) from [survival.jsonl](survival.jsonl). Every fault of
`configs/fault/default.yaml`, and real ones without injection, against three trainers: `guards=off`, `guards=default`,
and Brax's PPO as published (`brax.training.agents.ppo.train`) for every fault that can be put into an environment.

![the matrix](survival.png)

A cell is `median / least`: the median return and the least return over its seeds, {seeds} or more. Both are shares of
the clean training's median return with the same trainer. **nan**: the parameters or statistics of a seed are not
finite. **stopped**: a run ended before its last step.

| colour | meaning |
| --- | --- |
| green | the least seed is at 0.95 or more |
| amber | the least seed is at 0.8 or more, but below 0.95 |
| red | any seed is below 0.8, not finite or stopped |
| grey, `n/a` | this trainer or physics cannot have such a fault |
| white, empty | not measured yet |

| task | environment | settings | steps |
| --- | --- | --- | ---: |
| inverted pendulum | Brax's `generalized`, MuJoCo MJX | `env=inverted_pendulum`, learning rate 3e-4 | 204,800 |
| point mass | `PointMass` of `scripts/stability/tasks.py` | `ppo=fast`, `network=small`, learning rate 1e-3 | 256,000 |

A training has 100 iterations. A fault begins after 10 of them and, unless its name says otherwise, lasts to the end:
1 in 1,000 environment steps or samples, 1 in 20 minibatches. Policies are evaluated on the environment without the
fault: {episodes} episodes, the mean action.

The faults at iteration 60 are finite collapses of a solved task. Each lasts one iteration. Where no limiter contains a
collapse, its cure is a rollback by the supervisor. These cases are therefore whole runs, with five seeds.

Faults of the environment strike the same steps whatever their kind, and every bad sample is masked out. Such rows often
agree to the digit: they are one training. A solved pendulum falls now and then, with guards or without, fault or not
([lab_log.md](lab_log.md) has how often): look at the least seed.

The last column names the guards that tripped with `guards=default` and the median of their trips. `rollback` counts the
supervisor's rollbacks.
"""


def cell(rows: Sequence[Row], clean: float, possible: bool = True) -> tuple[str, int | None]:
    """Returns the text of a cell and its colour: `RED`, `AMBER` or `GREEN`; None for a cell without a measurement."""
    if not possible:
        return _IMPOSSIBLE, None
    if not rows or not np.isfinite(clean):
        return _NOT_MEASURED, None
    shares = [0.0 if row["return"] is None else row["return"] / clean for row in rows]
    least = min(shares)
    text = f"{np.median(shares):.2f} / {least:.2f}"
    if not all(row["finite"] for row in rows):
        return f"**nan** {text}", RED
    if not all(row["finished"] for row in rows):
        return f"**stopped** {text}", RED
    if least >= ENOUGH:
        return text, GREEN
    return text, AMBER if least >= TOO_LITTLE else RED


def trips(rows: Sequence[Row]) -> str:
    """Returns the guards that tripped, each with the median of its trips over the seeds."""
    names = sorted({name for row in rows for name in row["trips"]})
    return ", ".join(f"{name} {np.median([row['trips'].get(name, 0) for row in rows]):,.0f}" for name in names)


def write(rows: Sequence[Row], cases: Sequence[str], results: Path, possible: Callable[[str, str, str], bool]) -> None:
    """Writes the page and the picture beside the results."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        return
    by = {(t, s, c): matching(rows, task=t, side=s, case=c) for t in tasks for s in SIDES for c in cases}
    columns = [(task, side) for task in tasks for side in SIDES if any(by[task, side, case] for case in cases)]
    clean = {key: [row["return"] or 0.0 for row in by[*key, "clean"]] for key in columns}
    median = {key: float(np.median(values)) if any(values) else np.nan for key, values in clean.items()}
    drawn = {(*key, case): cell(by[*key, case], median[key], possible(*key, case)) for key in columns for case in cases}
    lines = [_INTRODUCTION.format(episodes=32, seeds=min(len(own) for own in by.values() if own))]
    for task in tasks:
        sides = [side for own, side in columns if own == task]
        header = ("fault", *(TITLES[side] for side in sides), "tripped")
        cells = [
            (case, *(drawn[task, side, case][0] for side in sides), trips(by[task, "default", case])) for case in cases
        ]
        lines += [f"\n## {_title(task)}\n", *pages.table(header, cells, (0, len(header) - 1))]
    lines.append(f"\n{pages.machine()}")
    (results.parent / "survival.md").write_text("\n".join(lines) + "\n")
    titles = [f"{TITLES[side]}\n" + _title(task).replace(", ", "\n") for task, side in columns]
    matrix = [[drawn[*key, case] for key in columns] for case in cases]
    _draw(matrix, cases, titles, results.parent / "survival.png")


def _title(task: str) -> str:
    return TASKS.get(task, task)


def _draw(
    matrix: Sequence[Sequence[tuple[str, int | None]]], cases: Sequence[str], columns: Sequence[str], path: Path
) -> None:
    from matplotlib.colors import to_rgb

    def shade(text: str, colour: int | None) -> tuple[float, float, float]:
        if colour is not None:
            return to_rgb(_COLOURS[colour])
        return to_rgb("#eeeeee" if text == _IMPOSSIBLE else "white")

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
        groups = [title.partition("\n")[2] for title in columns]
        for column in range(1, len(columns)):
            if groups[column] != groups[column - 1]:
                axes.axvline(column - 0.5, color="white", linewidth=6)
        for spine in axes.spines.values():
            spine.set_visible(False)
        title = (
            "median / least return of the seeds, as a share of the clean training's\n"
            f"green: least {ENOUGH} or more, amber: {TOO_LITTLE} or more, red: below, not finite or stopped"
        )
        axes.set_title(title, fontsize=9, pad=12)
