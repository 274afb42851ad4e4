"""The page of `make tasks`: a row per task with returns, falls, a curve, and the published returns."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlstable.policy.statistics import estimate, interquartile_mean
from scripts import pages
from scripts.results import Row
from scripts.stability.page import KEPT, returns_of

if TYPE_CHECKING:
    from scripts.tasks.__main__ import Task

ENOUGH = 0.9  # share of a public record
_BARS = "▁▂▃▄▅▆▇█"
_FILMS = 3  # in a row of the gallery
STUCK = 0.1  # share of what the best seed of the task learned
_HEADER = (
    "task", "recipe", "steps, millions", "minutes a seed", "last return, IQM [95 %]", "least seed", "handed over, IQM",
    "curve", "below 0.8 of the best: at the end", "ever", "masked; trips", "public records", "ratios",
)  # fmt: skip
_ROBOTS = ("task", "model", *_HEADER[1:11], "greatest possible", "ratio")
_SOURCES = {"zoo": "Zoo", "slm": "SLM-Lab", "reppo": "Brax PPO", "reppo500": "Brax PPO"}


def latest(rows: Sequence[Row], name: str) -> list[Row]:
    """Returns the rows of a task's newest recipe, one per seed."""
    own = [row for row in rows if row["task"] == name]
    found = {row["seed"]: row for row in own if row["recipe"] == own[-1]["recipe"]}
    return [found[seed] for seed in sorted(found)]


def kept(returns: np.ndarray, best: float | None = None) -> np.ndarray:
    """Returns each evaluation's share of the best gain, from 0 on, or from the first evaluation if that is below 0.

    `best` is the return that gains are compared with; `None`: the highest evaluation.
    """
    start = min(0.0, float(returns[0]))
    gained = (returns.max() if best is None else best) - start
    return (returns - start) / gained if gained > 0 else np.ones_like(returns)


def fell(shares: np.ndarray) -> bool:
    """Returns whether an evaluation is below `KEPT` after the first one within 1 % of the best."""
    return bool(shares[(shares >= 0.99).argmax() :].min() < KEPT)


def sparkline(curves: Sequence[np.ndarray]) -> str:
    """Returns the median curve in characters, from the lowest to the highest value, at least from 0.

    A seed that was rolled back has more evaluations than the others.
    """
    shares = np.linspace(0.0, 1.0, min(len(values) for values in curves))
    median = np.median([np.interp(shares, np.linspace(0.0, 1.0, len(values)), values) for values in curves], axis=0)
    low, high = min(0.0, median.min()), max(0.0, median.max())
    levels = (median - low) / max(high - low, 1e-9) * (len(_BARS) - 1)
    return "".join(_BARS[round(level)] for level in levels)


def stuck(curves: Sequence[np.ndarray]) -> np.ndarray:
    """Returns, by seed, whether its best gain is less than `STUCK` of the best seed's, from 0 or a lower start on."""
    start = min(0.0, float(np.median([values[0] for values in curves])))
    gained = np.array([values.max() - start for values in curves])
    return gained < STUCK * gained.max()


def falls(curves: Sequence[np.ndarray]) -> tuple[int, int]:
    """Returns how many seeds end below `KEPT`, and how many ever fell; seeds that learned nothing lost nothing."""
    shares = [kept(values) for values, idle in zip(curves, stuck(curves), strict=True) if not idle]
    return sum(values[-1] < KEPT for values in shares), sum(map(fell, shares))


def lost(own: Sequence[Row]) -> int:
    """Returns how many seeds end below `KEPT` of the policy that they hand over, and learned something.

    Both policies are evaluated in the same fresh episodes; older rows have the last evaluation of the last policy. The
    highest of 20 evaluations is partly luck, so more seeds end below `KEPT` of it.
    """
    found = 0
    for row, idle in zip(own, stuck([returns_of(row) for row in own]), strict=True):
        values, again = returns_of(row), row.get("last_again")
        values[-1] = values[-1] if again is None else again
        found += not idle and kept(values, row["handed_over"])[-1] < KEPT
    return found


def line(rows: Sequence[Row], name: str, task: "Task", stale: bool = False) -> list[str]:
    own = latest(rows, name)
    curves = [returns_of(row) for row in own]
    last = estimate([values[-1] for values in curves], interquartile_mean)
    given = interquartile_mean([row["handed_over"] for row in own])
    ended, ever = falls(curves)
    learned = f"of {len(own) - stuck(curves).sum()}"
    cells = [
        own[0]["name"] + " †" * stale, f"{max(row['steps'][-1] for row in own) / 1e6:.2g}",
        f"{'' if 'cpu_minutes' in own[0] else '< '}{minutes(own):.1f}",
        pages.interval(last, _text),
        _text(min(values[-1] for values in curves)), _text(given), sparkline(curves),
        f"{ended} {learned}", f"{ever} {learned}", _kept_out(own),
    ]  # fmt: skip
    if task.model is not None and task.most is not None:
        return [f"{task.env}", f"`{task.model}`", *cells, f"{task.most:g}", f"{last.value / task.most:.2f}"]
    records = [
        f"{_SOURCES[source]} {_text(value)} ({steps:g} million)" for source, (value, steps) in task.record.items()
    ]
    ratios = [f"{last.value / value:.2f}" if value > 0 else "-" for value, _ in task.record.values()]
    return [task.name, *cells, ", ".join(records) or "none", ", ".join(ratios)]


def _kept_out(own: Sequence[Row]) -> str:
    """Returns the share of samples that guards masked, and their trips over all seeds."""
    masked = [row["masked"] for row in own if "masked" in row]
    trips = sum(sum(row["trips"].values()) for row in own)
    share = "?" if len(masked) < len(own) else f"{np.mean(masked):.1g}" if any(masked) else "0"
    return f"{share}; {trips:,}"


def write_gallery(rows: Sequence[Row], films: Mapping[str, str], path: Path) -> None:
    """Fills in the page of films, by the names of their tasks."""
    cells = []
    for name, film in films.items():
        task, own = name.split(":")[1], latest(rows, name)
        last = interquartile_mean([returns_of(row)[-1] for row in own])
        steps, spent = max(row["steps"][-1] for row in own) / 1e6, minutes(own)
        about = f"{task}: {_text(last)}, {steps:.2g} million steps, {spent:.1f} minutes of one core"
        cells.append(f"![{task}]({film})<br>{about}")
    lines = [cells[i : i + _FILMS] + [""] * (_FILMS - len(cells[i : i + _FILMS])) for i in range(0, len(cells), _FILMS)]
    pages.fill(path, {"films": "\n".join(pages.table([" "] * _FILMS, lines, range(_FILMS)))})


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def minutes(own: Sequence[Row]) -> float:
    """Returns the minutes of one core per seed, over all trainings; older rows have those of a busy machine's clock."""
    return sum({(x.get("commit"), x["minutes"]): x.get("cpu_minutes", x["minutes"]) for x in own}.values()) / len(own)


def write(rows: Sequence[Row], tasks: Mapping[str, "Task"], path: Path, stale: Collection[str] = ()) -> None:
    """Fills in the page; `stale` are the tasks whose recipe has changed since their training."""
    trained = {name: task for name, task in tasks.items() if any(row["task"] == name for row in rows)}
    parts = {}
    tasked, robots = (_HEADER, (0, 1, 7, 11)), (_ROBOTS, (0, 1, 2, 8))
    for source, (header, texts) in {"brax": tasked, "playground": tasked, "robot": robots}.items():
        lines = [line(rows, name, task, name in stale) for name, task in trained.items() if task.source == source]
        parts[source] = "\n".join(pages.table(header, lines, texts)) if lines else "Not trained yet."
    parts["answer"] = _answer({name: latest(rows, name) for name in trained}, tasks)
    pages.fill(path, parts)


def _answer(trained: Mapping[str, Sequence[Row]], tasks: Mapping[str, "Task"]) -> str:
    curves = {name: [returns_of(row) for row in own] for name, own in trained.items()}
    compared = [
        (estimate([values[-1] for values in curves[name]], interquartile_mean), tasks[name].record)
        for name in trained
        if tasks[name].record
    ]
    reached = [[last.value >= min(ENOUGH * value, value) for value, _ in own.values()] for last, own in compared]
    first, every = sum(found[0] for found in reached), sum(map(all, reached))
    above = sum((last.low or 0) > record["reppo"][0] for last, record in compared if "reppo" in record)
    ended, ever = sum((np.array(falls(own)) for own in curves.values()), np.zeros(2, int))
    idle, seeds = sum(stuck(own).sum() for own in curves.values()), sum(map(len, curves.values()))
    sentences = (
        f"{len(trained)} of {len(tasks)} tasks trained.",
        f"{first} of {len(reached)} with a public record reach {ENOUGH:.0%} of the first one, {every} of every one.",
        f"{above} are credibly above Brax's PPO at 50 million steps.",
        f"{idle} of {seeds} seeds learned nothing: less than a tenth of what the best seed of their task did.",
        f"Of the others, {ended} ended below {KEPT} of their highest evaluation, "
        f"{sum(map(lost, trained.values()))} below {KEPT} of the policy handed over, evaluated again.",
        f"{ever} were below {KEPT} of the highest in any evaluation after the first within 1 % of it.",
    )
    return " ".join(sentences)
