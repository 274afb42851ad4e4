"""Statistics of the rows of `make stability`: how much of its best return a seed keeps, and sides against `off`."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from scripts.results import Row

SIDES = ("off", "default", "strict", "brax")
KEPT = 0.8
_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Task:
    overrides: tuple[str, ...]  # settings, as `python -m rlstable.train` takes them
    seeds: int = 8  # number of seeds
    best: float | None = None  # best possible return per episode; None if unknown
    from_start: bool = False  # whether returns count from the first evaluation, because they are negative
    episodes: int = 16  # episodes of every evaluation
    scaled: tuple[str, float] | None = None  # the unscaled task and the factor on its rewards; None without a factor


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


def numbers(by: Mapping[tuple[str, str], Sequence[Row]], name: str, side: str, task: Task) -> Numbers | None:
    """Returns the measurements of a side on a task, None without rows."""
    rows, off = by.get((name, side), []), by.get((name, "off"), [])
    if not rows:
        return None
    start = start_of([row for (own, base), some in by.items() if own == name and base in SIDES for row in some], task)
    return Numbers(
        last=np.array([left(row, start) for row in rows]),
        fell=np.array([falls(row, start) for row in rows]),
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
