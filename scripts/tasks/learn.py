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


def judge(returns: Sequence[float], wanted: Mapping[str, Any]) -> bool:
    """Returns whether the mean and the least return of the seeds reach the thresholds; NaN does not."""
    return bool(np.mean(returns) >= wanted["mean"] and min(returns) >= wanted["least"])


def main(short: bool, train: _Train, about: Mapping[str, Any], out: Path, thresholds: Path = _THRESHOLDS) -> str | None:
    """Trains the tasks, adds a row to the history and its page, and returns a sentence if a threshold is missed."""
    asked = yaml.safe_load(thresholds.read_text())
    found: dict[str, list[float]] = {}
    for name, wanted in asked["tasks"].items():
        if not short or wanted.get("short"):
            rows = train(wanted["command"].split(), asked["seeds"])
            found[name] = [row["returns"][-1] for row in rows]
            verdict = "reached" if judge(found[name], wanted) else f"MISSED, wanted a mean of {wanted['mean']:g}"
            print(f"{name:24} {', '.join(f'{value:.4g}' for value in found[name])}  {verdict}", flush=True)
    missed = [name for name, returns in found.items() if not judge(returns, asked["tasks"][name])]
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
    returns = row["returns"][name]
    text = f"{np.mean(returns):,.4g} (least {min(returns):,.4g})"
    return f"**{text}**" if name in row["missed"] else text
