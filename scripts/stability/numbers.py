"""Statistics of the rows of `make stability`: how much of its best return a seed keeps, and sides against `off`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from scripts.results import Row

SIDES = ("off", "default", "strict", "before", "brax")
KEPT = 0.8
_RESAMPLES = 2000
# Sides without the event return_collapsed.
_UNWATCHED = ("off", "before", "brax")


@dataclasses.dataclass(frozen=True)
class Task:
    """A task to train on."""

    overrides: tuple[str, ...]  # settings, as `python -m rlstable.train` takes them
    seeds: int = 8  # number of seeds
    best: float | None = None  # best possible return per episode; None if unknown
    from_start: bool = False  # whether returns count from the first evaluation, because they are negative
    borrowed: bool = False  # whether the recipe is another task's
    episodes: int = 16  # episodes of every evaluation
    scaled: tuple[str, float] | None = None  # the unscaled task and the factor on its rewards; None without a factor


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The measurements of one side, on one task or over all of them."""

    last: np.ndarray  # by seed, return of the run's final state over the best evaluation
    low_at_end: np.ndarray  # by seed, whether `last` is below 0.8
    low_after_best: np.ndarray  # by seed, whether any evaluation after the best is below 0.8 of the best
    beyond: np.ndarray  # by seed, share of iterations beyond the bound; empty if the side has no such metric
    # probability of improvement over `off`, then its bootstrap resamples; None without `off`
    improvement: np.ndarray | None
    # ratio to `off` of the steps to 0.8 of the best return, then its resamples; None without `off`
    slowdown: np.ndarray | None
    collapses: int | None  # number of events `return_collapsed`; None if the side has no such event
    false_alarms: int | None  # the same number in healthy tasks; None if no task is known to be healthy
    speed: float | None  # ratio to `off` of the steps per second; None without `off`
    names: tuple[str, ...]  # by seed, task and number of the seed


def base_of(side: str) -> str:
    return side.split(" + ")[0]


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
    """Returns every evaluation as a share of the best, counted from `start`; 1 or 0 if the best is no gain."""
    returns = returns_of(row)
    gained = returns.max() - start
    return (returns - start) / gained if gained > 0 else (returns >= returns.max()).astype(float)


def left(row: Row, start: float) -> float:
    """Returns the return of a run's final state as a share of the seed's best evaluation, counted from `start`.

    A run that ends with its best state instead of a collapsed one has evaluated the best state, too.
    """
    if row.get("left") is None:
        return float(kept(row, start)[-1])
    gained = returns_of(row).max() - start
    return (row["left"] - start) / gained if gained > 0 else 1.0


def start_of(rows: Sequence[Row], task: Task) -> float:
    return float(np.median([returns_of(row)[0] for row in rows])) if task.from_start and rows else 0.0


def falls(row: Row, start: float) -> bool:
    shares = kept(row, start)
    return bool(shares[shares.argmax() :].min() < KEPT)


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


def steps_to(row: Row, level: float) -> float:
    """Returns the interpolated environment steps until evaluations reach a return; inf if never."""
    returns, steps = returns_of(row), row["steps"]
    reached = np.flatnonzero(returns >= level)
    if not reached.size:
        return math.inf
    first = int(reached[0])
    return float(np.interp(level, returns[first - 1 : first + 1], steps[first - 1 : first + 1]) if first else steps[0])


def slowdown(rows: Sequence[Row], off: Sequence[Row], start: float) -> np.ndarray:
    """Returns the ratio to `off` of the median steps to 0.8 of the median best return of `off`, then its resamples."""
    level = start + KEPT * (float(np.median([returns_of(row).max() for row in off])) - start)
    ours, theirs = (np.array([steps_to(row, level) for row in side]) for side in (rows, off))
    rng = np.random.default_rng(0)
    first, second = (side[rng.integers(len(side), size=(_RESAMPLES, len(side)))] for side in (ours, theirs))
    ours, theirs = (
        np.append(np.median(own), np.median(drawn, axis=1)) for own, drawn in ((ours, first), (theirs, second))
    )
    # Without a ratio if `off` itself never reaches the level.
    return np.divide(ours, theirs, out=np.full_like(ours, np.nan), where=np.isfinite(theirs))


def numbers(by: Mapping[tuple[str, str], Sequence[Row]], name: str, side: str, task: Task) -> Numbers | None:
    """Returns the measurements of a side on a task, None without rows.

    The baseline of a side with further settings is the side itself instead of `off`.
    """
    base = base_of(side)
    baseline = "off" if side == base else base
    rows, off = by.get((name, side), []), by.get((name, baseline), [])
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
        improvement=improvement(rows, off) if off and side != baseline else None,
        slowdown=slowdown(rows, off, start) if off and side != baseline else None,
        collapses=collapses,
        false_alarms=collapses if healthy else None,
        speed=float(np.median(speeds[0]) / np.median(speeds[1])) if all(speeds) else None,
        names=tuple(f"{name} {row['seed']}" for row in rows),
    )


def together(parts: Sequence[Numbers]) -> Numbers:
    """Returns the measurements of a side over several tasks, as means over tasks for improvement, steps and speed."""

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
    """Returns the values with their resamples in another order for each task, because tasks are independent."""
    rng = np.random.default_rng(1)
    return [np.append(values[0], rng.permutation(values[1:])) for values in values_of_tasks]
