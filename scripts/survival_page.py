"""The page and the picture of the survival matrix, from its results."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

Row = dict[str, Any]
SIDES = ("off", "default", "brax")
TITLES = {"off": "guards=off", "default": "guards=default", "brax": "Brax PPO"}
ENOUGH = 0.95
_INTRODUCTION = """# What a training survives

Written by `make survival` (`scripts/survival.py`) from [survival.jsonl](survival.jsonl). Every fault of
`configs/fault/default.yaml`, and real ones without injection, against three trainers: `guards=off`, `guards=default`,
and Brax's PPO as published (`brax.training.agents.ppo.train`) for every fault that can be put into an environment.

Task: the inverted pendulum with the settings of `configs/env/inverted_pendulum.yaml` at a learning rate of 3e-4 for
{steps:,} steps, physics by Brax's `generalized` and by MuJoCo MJX. A fault begins after 10 of 100 iterations and,
unless its name says otherwise, lasts to the end: 1 in 1,000 environment steps or samples, 1 in 20 minibatches. Policies
are judged on the environment without the fault: {episodes} episodes, the mean action.

A cell is the median over its seeds, {seeds} or more, of the return as a share of the clean training's of the same
trainer, with the least and greatest seed in brackets; **nan** where the parameters or statistics of any seed are not
finite; "n/a" where that trainer or physics can have no such fault. Faults of the environment strike the same steps
whatever their kind, and a sample that is left out is left out whatever was bad, so that such rows often agree to the
digit: they are one training. A solved pendulum comes undone now and then, with guards or without, fault or not
(docs/decisions.md has how often): look at the brackets.
Behind `guards=default` stand the guards that tripped, with the median of their trips. Survived is 0.95 or more with
finite parameters.

![the matrix](survival.png)
"""


def read(path: Path) -> list[Row]:
    """The results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def machine() -> str:
    """The versions and the device that results of this process are of."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "brax", "mujoco", "mujoco-mjx"))
    return f"Python {platform.python_version()}, {versions}, on {jax.devices()[0].device_kind}."


def cell(rows: Sequence[Row], clean: float, possible: bool = True) -> tuple[str, float | None]:
    """What a cell says, and its number: the median share of the clean return, 0 where it died, None where it has none.

    Args:
        rows: One per seed.
        clean: The clean return.
        possible: Whether this trainer and physics can have such a fault.
    """
    if not rows:
        return ("not run" if possible else "n/a"), None
    shares = [0.0 if row["return"] is None else row["return"] / clean for row in rows]
    text = f"{np.median(shares):.2f} [{min(shares):.2f}, {max(shares):.2f}]"
    if not all(row["finite"] for row in rows):
        return f"**nan** {text}", 0.0
    return text if all(row["finished"] for row in rows) else f"**stopped** {text}", float(np.median(shares))


def trips(rows: Sequence[Row]) -> str:
    """The guards that tripped, each with the median of its trips over the seeds."""
    names = sorted({name for row in rows for name in row["trips"]})
    return ", ".join(f"{name} {np.median([row['trips'].get(name, 0) for row in rows]):,.0f}" for name in names)


def write(rows: Sequence[Row], cases: Sequence[str], results: Path, possible: Callable[[str, str, str], bool]) -> None:
    """Writes the page and the picture beside the results.

    Args:
        rows: The results.
        cases: Names, in order.
        results: The file they are from.
        possible: Whether a task, a side and a case go together.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        return
    by = {(t, s, c): [r for r in rows if (r["task"], r["side"], r["case"]) == (t, s, c)]
          for t in tasks for s in SIDES for c in cases}  # fmt: skip
    columns = [(task, side) for task in tasks for side in SIDES if any(by[task, side, case] for case in cases)]
    numbers = np.full((len(cases), len(columns)), np.nan)
    words = np.full(numbers.shape, "", dtype=object)
    parts = [_INTRODUCTION.format(steps=204_800, episodes=32, seeds=min(len(own) for own in by.values() if own))]
    for task in tasks:
        sides = [side for own, side in columns if own == task]
        parts.append(f"\n## {task}\n")
        parts.append("| fault | " + " | ".join(TITLES[side] for side in sides) + " | tripped |")
        parts.append("| --- |" + " ---: |" * len(sides) + " --- |")
        for index, case in enumerate(cases):
            texts = []
            for side in sides:
                clean = [row["return"] or 0.0 for row in by[task, side, "clean"]]
                own, measure = by[task, side, case], float(np.median(clean)) if clean else np.nan
                text, number = cell(own, measure, possible(task, side, case))
                texts.append(text)
                place = index, columns.index((task, side))
                numbers[place] = np.nan if number is None else number
                words[place] = text if number is None else f"{number:.2f}"
            parts.append(f"| {case} | " + " | ".join(texts) + f" | {trips(by[task, 'default', case])} |")
    parts.append(f"\n{machine()}")
    (results.parent / "survival.md").write_text("\n".join(parts) + "\n")
    _draw(numbers, words, cases, [f"{TITLES[side]}\n{task}" for task, side in columns], results.parent / "survival.png")


def _draw(numbers: np.ndarray, words: np.ndarray, cases: Sequence[str], columns: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(2.5 + 1.35 * len(columns), 0.3 * len(cases) + 1.4))
    colours = plt.get_cmap("RdYlGn").with_extremes(bad="#eeeeee")
    axes.imshow(np.clip(numbers, 0, 1), aspect="auto", cmap=colours, vmin=0, vmax=1)
    for (row, column), number in np.ndenumerate(numbers):
        weight, colour = "bold" if number >= ENOUGH else "normal", "white" if number < 0.2 else "black"
        axes.text(column, row, words[row, column], ha="center", va="center", fontsize=8, weight=weight, color=colour)
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(cases)), cases, fontsize=8)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("return as a share of the clean training's, median of seeds (0: not finite)", fontsize=9, pad=12)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
