"""Trends of a history: magnitudes over steps, and the first quantity that left its usual range."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from rlstable.replay.history import History
from rlstable.replay.report import MAIN
from rlstable.supervise.bad_values import group, in_causal_order, magnitude

_UNUSUAL = 10.0  # times the usual magnitude, which is the median of the history's first half
_LEAST = 8  # least steps for a median
_SHOWN = (*range(9), 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
_DOUBLES = {"q": "qpos", "qd": "qvel"}  # Brax's names of MuJoCo's arrays


def magnitudes(history: History) -> dict[str, np.ndarray]:
    """Returns the largest magnitude of every quantity before every step, in the order bad numbers spread."""
    steps = {name.removeprefix("before/"): x for name, x in history.arrays.items()}
    bad = {**history.incident.part("before"), "action": history.incident.arrays["action"]}
    names = [name for name in in_causal_order(bad) if name in steps and np.issubdtype(bad[name].dtype, np.floating)]
    return {name: np.array([magnitude(x) for x in [*steps[name], bad[name]]]) for name in names if bad[name].size}


def first_unusual(history: History) -> str:
    """Returns a sentence about the first quantity that left its usual range and did not return."""
    if history.facts["steps"] < _LEAST:
        return "the history is too short to know the usual range"
    found: tuple[int, str] | None = None
    for name, sizes in magnitudes(history).items():
        usual = float(np.median(sizes[: (len(sizes) + 1) // 2]))
        within = np.flatnonzero(sizes <= _UNUSUAL * usual)
        since = int(within[-1]) + 1 if within.size else 0
        if group(name) in ("action", "physics", "obs") and since < len(sizes) and (found is None or since < found[0]):
            ago = len(sizes) - 1 - since
            when = f"{ago} step{'s' * (ago != 1)} before the bad one" if ago else "just before the bad step"
            change = f"{sizes[since]:.3g}, usually {usual:.3g}"
            found = since, f"{name} was the first to leave its usual range for good, {when}: {change}"
    return "no quantity left its usual range before the bad step: the change was sudden" if found is None else found[1]


def rows(history: History) -> list[dict[str, Any]]:
    """Returns magnitudes by quantity for all late and some early steps; `step` 0 is the bad step."""
    sizes = {name: x for name, x in magnitudes(history).items() if _main(name, history)}
    count = history.facts["steps"]
    chosen = sorted({ago for ago in _SHOWN if ago <= count} | {count}, reverse=True)
    rewards = [*history.arrays["reward"], history.incident.arrays.get("after/reward", np.nan)]
    return [
        {"step": -ago, **{name: float(x[count - ago]) for name, x in sizes.items()}, "reward": float(rewards[-1 - ago])}
        for ago in chosen
    ]


def _main(name: str, history: History) -> bool:
    root, _, last = name.partition("/")
    double = f"before/{root}/{_DOUBLES.get(last, '')}" in history.arrays
    return group(name) == "obs" or ((last or root) in MAIN and name not in ("reward", "done") and not double)


def table(history: History) -> Table:
    """Returns the table for a terminal."""
    shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    found = rows(history)
    for name in found[0]:
        shown.add_column("  step" if name == "step" else name.partition("/")[2] or name, justify="right", no_wrap=True)
    for row in found:
        shown.add_row(f"  {row['step']}", *[f"{x:.3g}" for name, x in row.items() if name != "step"])
    return shown


def lines(history: History) -> list[Text]:
    """Returns remarks about the history."""
    facts, folder = history.facts, history.incident.folder
    start = f"checkpoint {facts['from_iteration']}" if facts["from_iteration"] else "the beginning"
    remarks = [
        f"{facts['steps']} steps in {folder / 'history.npz'}",
        f"retrained from {start}; the history begins {facts['begins']}",
        first_unusual(history),
    ]
    if facts["exact"]:
        return [Text(f"  {text}") for text in [*remarks, f"the bad step at its end: {facts['as_in_the_run']}"]]
    others = ", ".join(f"{name} {change}" for name, change in facts["other_versions"].items())
    why = f"other versions ({others})" if others else (
        "possible causes: a GPU without deterministic=true, other code, custom guards, or a run resumed with "
        "another configuration"
    )  # fmt: skip
    warning = Text(f"  not exact: {facts['as_in_the_run']}; {why}", style="bold yellow")
    return [*(Text(f"  {text}") for text in remarks), warning]


def as_data(history: History) -> dict[str, Any]:
    """Returns the history as data for JSON; numbers that are not finite become text."""
    plain = [{name: x if np.isfinite(x) else str(x) for name, x in row.items()} for row in rows(history)]
    kept = ("steps", "asked", "begins", "from_iteration", "exact", "as_in_the_run", "other_versions")
    return {
        "file": str(history.incident.folder / "history.npz"),
        **{name: history.facts[name] for name in kept},
        "first_unusual": first_unusual(history),
        "magnitudes": plain,
    }
