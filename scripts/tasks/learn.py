"""Trains a few tasks and compares their returns with the thresholds of `learn.yaml`, before a change lands."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from scripts import pages, results
from scripts.results import Row

_THRESHOLDS = Path(__file__).parent / "learn.yaml"
_Train = Callable[[Sequence[str], int], list[Row]]


def judge(rows: Sequence[Row], wanted: Mapping[str, Any]) -> bool:
    """Returns whether the mean last return and the least handed over reach the thresholds; NaN does not."""
    mean, least = np.mean([row["returns"][-1] for row in rows]), np.min([row["handed_over"] for row in rows])
    return bool(mean >= wanted["mean"] and least >= wanted["least"])


def main(short: bool, train: _Train, about: Mapping[str, Any], out: Path, thresholds: Path = _THRESHOLDS) -> str | None:
    """Trains the tasks, adds a row to the history and its page, and returns a sentence if a threshold is missed."""
    asked = yaml.safe_load(thresholds.read_text())
    found: dict[str, dict[str, list[float]]] = {}
    missed = []
    for name, wanted in asked["tasks"].items():
        if not short or wanted.get("short"):
            rows = train(wanted["command"].split(), asked["seeds"])
            last, given = [row["returns"][-1] for row in rows], [row["handed_over"] for row in rows]
            found[name] = {"last": last, "handed_over": given}
            missed += [] if judge(rows, wanted) else [name]
            verdict = f"MISSED: {wanted['mean']:g}, {wanted['least']:g}" if name in missed else "reached"
            said = f"last {', '.join(f'{value:.4g}' for value in last)}; handed over at least {min(given):.4g}"
            print(f"{name:28} {said}; {verdict}", flush=True)
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
    found = row["returns"][name]
    text = f"{np.mean(found['last']):,.4g} (handed over at least {min(found['handed_over']):,.4g})"
    return f"**{text}**" if name in row["missed"] else text
