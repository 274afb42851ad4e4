"""The page and the picture of `make stability`, from the rows of all seeds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.policy.statistics import Estimate, estimate, interquartile_mean
from scripts import pages
from scripts.results import Row
from scripts.stability.numbers import KEPT, SIDES, Numbers, Task, latest, numbers, returns_of, together

TITLES = {"off": "guards=off", "default": "guards=default", "strict": "guards=strict", "brax": "Brax PPO"}
_COLUMNS = (
    "last over best, IQM", "below 0.8 at the end", "below 0.8 after the best", "improvement over off", "collapses",
    "least seed",
)  # fmt: skip
_POINTS = 64


def cells(found: Numbers | None, shows_task: bool) -> list[str]:
    if found is None:
        return [""] * len(_COLUMNS)
    middle = estimate(found.last, interquartile_mean)
    least = int(found.last.argmin())
    name = found.names[least] if shows_task else f"seed {found.names[least].split()[-1]}"
    return [
        interval(middle),
        share(found.last < KEPT),
        share(found.fell),
        "" if found.improvement is None else interval(_estimate(found.improvement)),
        "" if found.collapses is None else str(found.collapses),
        f"{found.last[least]:.2f} ({name})",
    ]


def _estimate(drawn: np.ndarray) -> Estimate:
    low, high = np.percentile(drawn[1:], [2.5, 97.5])
    return Estimate(float(drawn[0]), float(low), float(high))


def interval(of: Estimate) -> str:
    return f"{of.value:.2f}" + ("" if of.low is None else f" [{of.low:.2f}, {of.high:.2f}]")


def share(flags: np.ndarray) -> str:
    """Returns how many of the seeds, as a cell."""
    return f"{int(flags.sum())} of {len(flags)} ({flags.mean():.1%})"


def answer(all_of: Mapping[str, Numbers], tasks: int) -> str:
    parts = [f"`guards={side}` {share(all_of[side].last < KEPT)}" for side in ("default", "off") if side in all_of]
    text = f"Seeds that end below 0.8 of their best return, over {tasks} tasks: {', '.join(parts)}."
    ours = all_of.get("default")
    if ours is not None and ours.improvement is not None:
        text += " A seed of `guards=default` has the higher return at equal steps with probability"
        text += f" {interval(_estimate(ours.improvement))}."
    return text


def lines_of(by: Mapping[tuple[str, str], Sequence[Row]], name: str, task: Task) -> list[list[str]]:
    """Returns a line of the table of tasks for each side that was trained."""
    found = []
    for side in SIDES:
        rows, own = by.get((name, side), []), numbers(by, name, side, task)
        if own is not None:
            best = "" if task.best is None else f"{np.median([returns_of(row).max() for row in rows]) / task.best:.2f}"
            early = Counter(row["stop_reason"] for row in rows if row["stop_reason"] != "completed")
            ended = ", ".join(f"`{reason}` {count}" for reason, count in early.items())
            found.append([name, TITLES[side], *cells(own, False), best, ended])
    return found


def scales(by: Mapping[tuple[str, str], Sequence[Row]], tasks: Mapping[str, Task]) -> list[list[str]]:
    lines = []
    for name, task in tasks.items():
        rows = by.get((name, "default"), [])
        if task.scaled is not None and task.best is not None and rows:
            last = [returns_of(row)[-1] / task.best for row in rows]
            shown = (*task.scaled, len(rows), f"{np.median(last):.3f}", f"{min(last):.3f}")
            lines.append([str(cell) for cell in shown])
    return lines


def write(rows: Sequence[Row], tasks: Mapping[str, Task], results: Path) -> None:
    by = {key: some for key, some in latest(rows).items() if key[0] in tasks}
    shown = [name for name in tasks if any((name, side) in by for side in SIDES)]
    page = results.parent / "stability.md"
    if not shown:
        pages.fill(page, {"answer": "`make stability` has trained no seed yet."})
        return
    found = {side: [numbers(by, name, side, tasks[name]) for name in shown] for side in SIDES}
    present = {side: [own for own in some if own is not None] for side, some in found.items()}
    all_of = {side: together(some) for side, some in present.items() if some}
    summary = [(TITLES[side], str(len(present[side]) or ""), *cells(all_of.get(side), True)) for side in SIDES]
    lines = [line for name in shown for line in lines_of(by, name, tasks[name])]
    parts = {
        "answer": [answer(all_of, len(shown))],
        "summary": pages.table(("side", "tasks", *_COLUMNS), summary),
        "tasks": pages.table(("task", "side", *_COLUMNS, "best over best possible", "ended early"), lines, (0, 1)),
        "scales": pages.table(
            ("task", "rewards times", "seeds", "last over best possible", "least"), scales(by, tasks)
        ),
    }
    pages.fill(page, {name: "\n".join(text) for name, text in parts.items()})
    draw(by, shown, results.parent / "stability.png")


def draw(by: Mapping[tuple[str, str], Sequence[Row]], names: Sequence[str], path: Path) -> None:
    """Draws a panel per task: the seeds of off and default as thin lines, their medians as thick ones."""
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    layout = {"nrows": lines, "ncols": columns, "figsize": (3.2 * columns, 2.3 * lines), "squeeze": False}
    with pages.picture(path, dpi=110, tight=False, **layout) as (figure, grid):
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, names, strict=False):
            for side, colour in (("off", "tab:red"), ("default", "tab:blue")):
                if rows := by.get((name, side), []):
                    _draw_side(axes, rows, colour, TITLES[side])
            axes.set_title(name, fontsize=9)
            pages.plain(axes, size=7)
        for axes in grid[:, 0]:
            axes.set_ylabel("return", fontsize=8)
        for axes in grid[-1]:
            axes.set_xlabel("thousand steps", fontsize=8)
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="upper center", ncols=2, fontsize=9, frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.96 if lines > 1 else 0.9))


def _draw_side(axes: Any, rows: Sequence[Row], colour: str, label: str) -> None:
    curves = [(np.array(row["steps"]) / 1000, returns_of(row)) for row in rows]
    # Seeds that rolled back or stopped early have other steps.
    shared = np.linspace(curves[0][0][0], np.median([steps[-1] for steps, _ in curves]), _POINTS)
    for steps, returns in curves:
        axes.plot(steps, returns, color=colour, linewidth=0.6, alpha=0.35)
    middle = np.median([np.interp(shared, *curve) for curve in curves], axis=0)
    axes.plot(shared, middle, color=colour, linewidth=2, label=label)
