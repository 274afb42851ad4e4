"""Statistics of the rows of `make stability`: how much of its best return a seed keeps, and sides against `off`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

SIDES = ("off", "default", "strict", "before", "brax")
KEPT = 0.8
_RESAMPLES = 2000
# Sides that have no event return_collapsed.
_UNWATCHED = ("off", "before", "brax")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to train on.

    Attributes:
        overrides: Settings, as `python -m rlstable.train` takes them.
        seeds: Number of seeds.
        best: Best possible return per episode, None where it is not known.
        from_start: Whether returns count from the first evaluation, because they are negative.
        borrowed: Whether the recipe is that of another task.
        episodes: Of every evaluation.
        scaled: Where rewards are multiplied, the name of the task without that and the factor.
    """

    overrides: tuple[str, ...]
    seeds: int = 8
    best: float | None = None
    from_start: bool = False
    borrowed: bool = False
    episodes: int = 16
    scaled: tuple[str, float] | None = None


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The measurements of one side, on one task or over all of them.

    Attributes:
        last: Return of the state that the run leaves over the best evaluation, by seed.
        low_at_end: By seed, whether that is below 0.8.
        low_after_best: By seed, whether any evaluation after the best is below 0.8 of it.
        beyond: Share of iterations beyond the bound, by seed; empty where the side has no such metric.
        improvement: Probability of improvement over `off`, then its bootstrap resamples; None without `off`.
        slowdown: Steps to 0.8 of the best return over those of `off`, then its resamples; None without `off`.
        collapses: Number of events `return_collapsed`, None where the side has no such event.
        false_alarms: The same number in healthy tasks, None where no task is known to be healthy.
        speed: Steps per second over those of `off`, None without `off`.
        names: By seed, its task and number.
    """

    last: np.ndarray
    low_at_end: np.ndarray
    low_after_best: np.ndarray
    beyond: np.ndarray
    improvement: np.ndarray | None
    slowdown: np.ndarray | None
    collapses: int | None
    false_alarms: int | None
    speed: float | None
    names: tuple[str, ...]


def base_of(side: str) -> str:
    """The side without the settings that are added to it."""
    return side.split(" + ")[0]


def latest(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """The rows by task and side, in the order of seeds; of several rows of a seed the last one."""
    found = {(row["task"], row["side"], row["seed"]): row for row in rows}
    by: dict[tuple[str, str], list[Row]] = {}
    for (task, side, _), row in sorted(found.items(), key=lambda item: item[0][2]):
        by.setdefault((task, side), []).append(row)
    return by


def returns_of(row: Row) -> np.ndarray:
    """The evaluations of a seed; one without a finite return counts as the lowest, at most 0."""
    values = np.array([np.nan if value is None else value for value in row["returns"]], dtype=float)
    finite = values[np.isfinite(values)]
    return np.where(np.isfinite(values), values, min([0.0, *finite]))


def kept(row: Row, start: float) -> np.ndarray:
    """Every evaluation as a share of the seed's best, counted from `start`; 1 or 0 where the best is no gain."""
    returns = returns_of(row)
    gained = returns.max() - start
    return (returns - start) / gained if gained > 0 else (returns >= returns.max()).astype(float)


def left(row: Row, start: float) -> float:
    """The return of the state that a run leaves, as a share of the seed's best evaluation, counted from `start`.

    A run that ends with its best state instead of a collapsed one has evaluated that state, too.
    """
    if row.get("left") is None:
        return float(kept(row, start)[-1])
    gained = returns_of(row).max() - start
    return (row["left"] - start) / gained if gained > 0 else 1.0


def start_of(rows: Sequence[Row], task: Task) -> float:
    """The return from which the task's returns count."""
    return float(np.median([returns_of(row)[0] for row in rows])) if task.from_start and rows else 0.0


def falls(row: Row, start: float) -> bool:
    """Whether an evaluation after the best is below 0.8 of it."""
    shares = kept(row, start)
    return bool(shares[shares.argmax() :].min() < KEPT)


def improvement(rows: Sequence[Row], off: Sequence[Row]) -> np.ndarray:
    """The probability that a seed returns more over its curve than one of `off`, then its resamples over seeds.

    Args:
        rows: Of one side.
        off: The measure. Both are compared at its steps.
    """
    steps = off[0]["steps"]
    ours, theirs = (
        np.array([np.interp(steps, row["steps"], returns_of(row)).mean() for row in side]) for side in (rows, off)
    )
    wins = (ours[:, None] > theirs) + 0.5 * (ours[:, None] == theirs)
    rng = np.random.default_rng(0)
    first, second = (rng.integers(len(side), size=(_RESAMPLES, len(side))) for side in (ours, theirs))
    return np.append(wins.mean(), wins[first[:, :, None], second[:, None, :]].mean(axis=(1, 2)))


def steps_to(row: Row, level: float) -> float:
    """Environment steps until evaluations reach a return, between two evaluations by interpolation; inf if never."""
    returns, steps = returns_of(row), row["steps"]
    reached = np.flatnonzero(returns >= level)
    if not reached.size:
        return math.inf
    first = int(reached[0])
    return float(np.interp(level, returns[first - 1 : first + 1], steps[first - 1 : first + 1]) if first else steps[0])


def slowdown(rows: Sequence[Row], off: Sequence[Row], start: float) -> np.ndarray:
    """The median steps to 0.8 of the median best return of `off`, over those of `off`; then its resamples over seeds.

    Args:
        rows: Of one side.
        off: The measure.
        start: Return from which returns count.
    """
    level = start + KEPT * (float(np.median([returns_of(row).max() for row in off])) - start)
    ours, theirs = (np.array([steps_to(row, level) for row in side]) for side in (rows, off))
    rng = np.random.default_rng(0)
    first, second = (side[rng.integers(len(side), size=(_RESAMPLES, len(side)))] for side in (ours, theirs))
    ours, theirs = (
        np.append(np.median(own), np.median(drawn, axis=1)) for own, drawn in ((ours, first), (theirs, second))
    )
    # If `off` itself never gets there, there is no ratio.
    return np.divide(ours, theirs, out=np.full_like(ours, np.nan), where=np.isfinite(theirs))


def numbers(by: Mapping[tuple[str, str], Sequence[Row]], name: str, side: str, task: Task) -> Numbers | None:
    """The measurements of a side on a task, None where it has no row.

    A side with further settings is compared with the side itself instead of `off`.

    Args:
        by: All rows by task and side.
        name: Of the task.
        side: Its name.
        task: The task.
    """
    base = base_of(side)
    measure = "off" if side == base else base
    rows, off = by.get((name, side), []), by.get((name, measure), [])
    if not rows:
        return None
    start = start_of([row for (own, _), some in by.items() for row in some if own == name], task)
    last = np.array([left(row, start) for row in rows])
    collapses = None if base in _UNWATCHED else sum(row["return_collapsed"] for row in rows)
    healthy = bool(off) and not any(falls(row, start) for row in off)
    speeds = [[row["steps_per_second"] for row in some if row["steps_per_second"]] for some in (rows, off)]
    return Numbers(
        last=last,
        low_at_end=last < KEPT,
        low_after_best=np.array([falls(row, start) for row in rows]),
        beyond=np.array([row["beyond"] for row in rows if row["beyond"] is not None], dtype=float),
        improvement=improvement(rows, off) if off and side != measure else None,
        slowdown=slowdown(rows, off, start) if off and side != measure else None,
        collapses=collapses,
        false_alarms=collapses if healthy else None,
        speed=float(np.median(speeds[0]) / np.median(speeds[1])) if all(speeds) else None,
        names=tuple(f"{name} {row['seed']}" for row in rows),
    )


def together(parts: Sequence[Numbers]) -> Numbers:
    """The measurements of a side over several tasks: seeds count alike, for improvement, steps and speed tasks do."""

    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    def total(name: str) -> int | None:
        counts = [getattr(part, name) for part in parts if getattr(part, name) is not None]
        return sum(counts) if counts else None

    improved = [part.improvement for part in parts if part.improvement is not None]
    slower = [part.slowdown for part in parts if part.slowdown is not None and np.isfinite(part.slowdown[0])]
    speeds = [part.speed for part in parts if part.speed is not None]
    return Numbers(
        **{name: joined(name) for name in ("last", "low_at_end", "low_after_best", "beyond")},
        improvement=np.mean(_apart(improved), axis=0) if improved else None,
        slowdown=np.exp(np.mean(np.log(_apart(slower)), axis=0)) if slower else None,
        collapses=total("collapses"),
        false_alarms=total("false_alarms"),
        speed=math.exp(np.mean(np.log(speeds))) if speeds else None,
        names=tuple(name for part in parts for name in part.names),
    )


def _apart(values_of_tasks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The same, with resamples in another order for each task: tasks are independent."""
    rng = np.random.default_rng(1)
    return [np.append(values[0], rng.permutation(values[1:])) for values in values_of_tasks]
