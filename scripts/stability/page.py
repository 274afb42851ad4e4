"""The page and the picture of `make stability`: how much of its best return a seed keeps, and sides against `off`."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from rlstable.policy.statistics import Estimate, estimate, interquartile_mean
from scripts import pages
from scripts.results import Row

TITLES = {"off": "guards=off", "default": "guards=default", "strict": "guards=strict", "brax": "Brax PPO"}
KEPT = 0.8
_COLUMNS = (
    "last over best, IQM", "below 0.8 at the end", "below 0.8 after the best", "improvement over off", "collapses",
    "least seed",
)  # fmt: skip
_SCALES = ("task", "rewards times", "seeds", "last over best possible", "least")
_RESAMPLES = 2000
_POINTS = 64


@dataclasses.dataclass(frozen=True)
class Task:
    overrides: tuple[str, ...]  # settings, as `python -m rlstable.train` takes them
    best: float | None = None  # best possible return per episode; None if unknown
    from_start: bool = False  # whether returns count from the first evaluation, because they are negative
    episodes: int = 16  # episodes of every evaluation
    scaled: tuple[str, float] | None = None  # the unscaled task and the factor on its rewards; None without a factor


Rows = Mapping[tuple[str, str], Sequence[Row]]  # by task and side


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The measurements of one side, on one task or over all of them."""

    last: np.ndarray  # by seed, return of the run's final state over the best evaluation
    fell: np.ndarray  # by seed, whether any evaluation after the best is below 0.8 of the best
    # probability of improvement over `off`, then its bootstrap resamples; None without `off`
    improvement: np.ndarray | None
    collapses: int | None  # number of events `return_collapsed`; None if the side has no such event
    names: tuple[str, ...]  # by seed, task and number of the seed


def latest(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Returns the rows by task and side, in the order of seeds; the last row of a seed counts."""
    found = {(row["task"], row["side"], row["seed"]): row for row in rows}
    by: dict[tuple[str, str], list[Row]] = {}
    for (task, side, _), row in sorted(found.items(), key=lambda item: item[0][2]):
        by.setdefault((task, side), []).append(row)
    return by


def returns_of(row: Row) -> np.ndarray:
    """Returns the evaluations of a seed; an evaluation without a finite return counts as the lowest, at most 0."""
    values = np.array([np.nan if value is None else value for value in row["returns"]], dtype=float)
    finite = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, min([0.0, *finite]))


def kept(row: Row, start: float) -> np.ndarray:
    """Returns every evaluation, then the state that the run leaves, as shares of the best evaluation from `start` on.

    A collapsed run leaves its best state. If the best is no gain, a share is 1 or 0.
    """
    returns = returns_of(row)
    values = np.append(returns, returns[-1] if row.get("left") is None else row["left"])
    gained = returns.max() - start
    return (values - start) / gained if gained > 0 else (values >= returns.max()).astype(float)


def improvement(rows: Sequence[Row], off: Sequence[Row]) -> np.ndarray:
    """Returns the probability that a seed returns more over its curve than a seed of `off`, then its resamples."""
    steps = off[0]["steps"]
    ours, theirs = (
        np.array([np.interp(steps, row["steps"], returns_of(row)).mean() for row in side]) for side in (rows, off)
    )
    wins = (ours[:, None] > theirs) + 0.5 * (ours[:, None] == theirs)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(len(side), size=(_RESAMPLES, len(side))) for side in (ours, theirs))
    return np.append(wins.mean(), wins[first[:, :, None], second[:, None, :]].mean(axis=(1, 2)))


def numbers(by: Rows, name: str, side: str, task: Task) -> Numbers | None:
    rows, off, start = by.get((name, side), []), by.get((name, "off"), []), 0.0
    if not rows:
        return None
    if task.from_start:
        start = float(np.median([returns_of(row)[0] for base in TITLES for row in by.get((name, base), [])]))
    shares = [kept(row, start) for row in rows]
    return Numbers(
        last=np.array([own[-1] for own in shares]),
        fell=np.array([own[own[:-1].argmax() : -1].min() < KEPT for own in shares]),
        improvement=improvement(rows, off) if off and side != "off" else None,
        collapses=sum(row["return_collapsed"] for row in rows) if side in ("default", "strict") else None,
        names=tuple(f"{name} {row['seed']}" for row in rows),
    )


def together(parts: Sequence[Numbers]) -> Numbers:
    """Returns the measurements of a side over several tasks; the improvement is the mean over tasks.

    Tasks are independent, so that their resamples are shuffled before they are averaged.
    """
    rng = np.random.default_rng(1)
    improved = [part.improvement for part in parts if part.improvement is not None]
    apart = [np.append(values[0], rng.permutation(values[1:])) for values in improved]
    counts = [part.collapses for part in parts if part.collapses is not None]
    return Numbers(
        last=np.concatenate([part.last for part in parts]),
        fell=np.concatenate([part.fell for part in parts]),
        improvement=np.mean(apart, axis=0) if apart else None,
        collapses=sum(counts) if counts else None,
        names=tuple(name for part in parts for name in part.names),
    )


def cells(found: Numbers, shows_task: bool) -> list[str]:
    least = int(found.last.argmin())
    name = found.names[least] if shows_task else f"seed {found.names[least].split()[-1]}"
    return [
        pages.interval(estimate(found.last, interquartile_mean), "{:.2f}".format),
        share(found.last < KEPT),
        share(found.fell),
        probability(found),
        "" if found.collapses is None else str(found.collapses),
        f"{found.last[least]:.2f} ({name})",
    ]


def probability(found: Numbers) -> str:
    if found.improvement is None:
        return ""
    low, high = np.percentile(found.improvement[1:], [2.5, 97.5])
    return pages.interval(Estimate(found.improvement[0], low, high), "{:.2f}".format)


def share(flags: np.ndarray) -> str:
    return f"{int(flags.sum())} of {len(flags)} ({flags.mean():.1%})"


def answer(all_of: Mapping[str, Numbers], tasks: int) -> str:
    parts = [
        f"`guards={side}` {share(all_of[side].last < KEPT)} at the end, {share(all_of[side].fell)} at any later time"
        for side in ("default", "off")
        if side in all_of
    ]
    text = f"Seeds below 0.8 of their best return, over {tasks} tasks: {'; '.join(parts)}. A run hands over its best."
    if "default" in all_of and (found := probability(all_of["default"])):
        text += f" A seed of `guards=default` has the higher return at equal steps with probability {found}."
    return text


def lines_of(by: Rows, name: str, task: Task) -> list[list[str]]:
    found = []
    for side, title in TITLES.items():
        rows, own = by.get((name, side), []), numbers(by, name, side, task)
        if own is not None:
            best = "" if task.best is None else f"{np.median([returns_of(row).max() for row in rows]) / task.best:.2f}"
            early = Counter(row["stop_reason"] for row in rows if row["stop_reason"] != "completed")
            ended = ", ".join(f"`{reason}` {count}" for reason, count in early.items())
            found.append([name, title, *cells(own, False), best, ended])
    return found


def scales(by: Rows, tasks: Mapping[str, Task]) -> list[list[str]]:
    lines = []
    for name, task in tasks.items():
        rows = by.get((name, "default"), [])
        if task.scaled is not None and task.best is not None and rows:
            last = [returns_of(row)[-1] / task.best for row in rows]
            shown = (*task.scaled, len(rows), f"{np.median(last):.3f}", f"{min(last):.3f}")
            lines.append([str(cell) for cell in shown])
    return lines


def write(rows: Sequence[Row], tasks: Mapping[str, Task], results: Path) -> None:
    by = latest(rows)
    shown = [name for name in tasks if any((name, side) in by for side in TITLES)]
    page = results.parent / "stability.md"
    if not shown:
        pages.fill(page, {"answer": "`make stability` has trained no seed yet."})
        return
    found = {side: [own for name in shown if (own := numbers(by, name, side, tasks[name]))] for side in TITLES}
    all_of = {side: together(some) for side, some in found.items() if some}
    summary = [(TITLES[side], str(len(found[side])), *cells(own, True)) for side, own in all_of.items()]
    # Tasks with scaled rewards have a table of their own.
    lines = [line for name in shown if not tasks[name].scaled for line in lines_of(by, name, tasks[name])]
    tables = {
        "summary": pages.table(("side", "tasks", *_COLUMNS), summary),
        "tasks": pages.table(("task", "side", *_COLUMNS, "best over best possible", "ended early"), lines, (0, 1)),
        "scales": pages.table(_SCALES, scales(by, tasks)),
    }
    parts = {name: "\n".join(text) for name, text in tables.items()}
    pages.fill(page, {"answer": answer(all_of, len(shown)), **parts})
    draw(by, shown, results.parent / "stability.png")


def draw(by: Rows, names: Sequence[str], path: Path) -> None:
    """Draws a panel per task: the seeds of off and default as thin lines, their medians as thick ones."""
    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.3 * lines))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names, strict=False):
        for side, colour in (("off", "tab:red"), ("default", "tab:blue")):
            if rows := by.get((name, side), []):
                _draw_side(axes, rows, colour, TITLES[side])
        axes.set_title(name, fontsize=9)
        axes.tick_params(labelsize=7, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("return", fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel("thousand steps", fontsize=8)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="upper center", ncols=2, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 0.96 if lines > 1 else 0.9))
    figure.savefig(path, dpi=110)


def _draw_side(axes: Any, rows: Sequence[Row], colour: str, label: str) -> None:
    curves = [(np.array(row["steps"]) / 1000, returns_of(row)) for row in rows]
    # Seeds that rolled back or stopped early have other steps.
    shared = np.linspace(curves[0][0][0], np.median([steps[-1] for steps, _ in curves]), _POINTS)
    for steps, returns in curves:
        axes.plot(steps, returns, color=colour, linewidth=0.6, alpha=0.35)
    middle = np.median([np.interp(shared, *curve) for curve in curves], axis=0)
    axes.plot(shared, middle, color=colour, linewidth=2, label=label)
