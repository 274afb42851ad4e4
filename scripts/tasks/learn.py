"""Trains a few tasks and compares their returns with the thresholds of `learn.yaml`, before a change lands."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scripts import pages, results
from scripts.results import Row

_THRESHOLDS = Path(__file__).parent / "learn.yaml"
_Train = Callable[[Sequence[str], range], Iterable[Row]]


def judge(rows: Sequence[Row], wanted: Mapping[str, Any]) -> bool:
    """Returns whether the mean last return is not below its interval and the least handed over reaches its threshold.

    A missing return does neither.
    """
    last = np.array([row["returns"][-1] for row in rows], float)  # None becomes NaN
    given = np.array([row["handed_over"] for row in rows], float)
    return bool(last.mean() >= wanted["mean"][0] and given.min() >= wanted["least"])


def main(short: bool, train: _Train, about: Mapping[str, Any], out: Path, thresholds: Path = _THRESHOLDS) -> str | None:
    """Trains the tasks, adds a row to the history and its page, and returns a sentence if a threshold is missed."""
    asked = yaml.safe_load(thresholds.read_text())
    found: dict[str, dict[str, list[float]]] = {}
    missed = []
    for name, wanted in asked["tasks"].items():
        if not short or wanted.get("short"):
            rows = list(train(wanted["command"].split(), range(asked["seeds"])))
            last, given = [row["returns"][-1] for row in rows], [row["handed_over"] for row in rows]
            found[name] = {"last": last, "handed_over": given}
            missed += [] if judge(rows, wanted) else [name]
            low, high = wanted["mean"]
            verdict = "above the interval: move it up" if np.array(last, float).mean() > high else "reached"
            verdict = f"MISSED: {low:g}, {wanted['least']:g}" if name in missed else verdict
            print(f"{name:28} {_text(found[name])}; {verdict}", flush=True)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    results.add(out, [{"day": day, "returns": found, "missed": missed, **about}])
    _write(results.read(out), list(asked["tasks"]), out.with_name("tasks.md"))
    return f"learn: too low a return: {', '.join(missed)}" if missed else None


def _write(rows: Sequence[Row], names: Sequence[str], path: Path) -> None:
    lines = [[row["day"], row["commit"], *(_cell(row, name) for name in names)] for row in reversed(rows)]
    pages.fill(path, {"history": "\n".join(pages.table(("day", "commit", *names), lines, (0, 1)))})


def _cell(row: Row, name: str) -> str:
    if name not in row["returns"]:
        return ""
    text = _text(row["returns"][name])
    return f"**{text}**" if name in row["missed"] else text


def _text(found: Mapping[str, Sequence[float | None]]) -> str:
    last, given = (np.array(found[name], float) for name in ("last", "handed_over"))
    return f"{last.mean():,.4g} (handed over at least {given.min():,.4g})"
