"""Trends of a history: how magnitudes grew, and which left its usual range first."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from rlstable.replay.history import History
from rlstable.replay.report import MAIN
from rlstable.supervise.bad_values import group, in_causal_order, magnitude

_UNUSUAL = 10.0  # times what is usual: the median of the history's first half, since the second may be the trouble
_LEAST = 8  # steps, of which a median says something
_SHOWN = (*range(9), 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
_DOUBLES = {"q": "qpos", "qd": "qvel"}  # Brax's names for what MuJoCo has already


def magnitudes(history: History) -> dict[str, np.ndarray]:
    """The largest magnitude of every quantity before every step, the bad one last, in the order bad numbers travel."""
    steps = {name.removeprefix("before/"): x for name, x in history.arrays.items()}
    bad = {**history.incident.part("before"), "action": history.incident.arrays["action"]}
    names = [name for name in in_causal_order(bad) if name in steps and np.issubdtype(bad[name].dtype, np.floating)]
    return {name: np.array([magnitude(x) for x in [*steps[name], bad[name]]]) for name in names if bad[name].size}


def first_unusual(history: History) -> str:
    """Which quantity was the first to leave its usual range for good, and when."""
    if history.facts["steps"] < _LEAST:
        return "the history is too short to say what is usual"
    found: tuple[int, str] | None = None
    for name, sizes in magnitudes(history).items():
        usual = float(np.median(sizes[: (len(sizes) + 1) // 2]))
        within = np.flatnonzero(sizes <= _UNUSUAL * usual)
        since = int(within[-1]) + 1 if within.size else 0
        if group(name) in ("action", "physics", "obs") and since < len(sizes) and (found is None or since < found[0]):
            ago = len(sizes) - 1 - since
            when = f"{ago} step{'s' * (ago != 1)} before the bad one" if ago else "just before the bad step"
            found = (
                since,
                (
                    f"{name} was the first to leave its usual range for good, {when}: "
                    f"{sizes[since]:.3g}, usually {usual:.3g}"
                ),
            )
    return "nothing had left its usual range before the bad step: it came at once" if found is None else found[1]


def rows(history: History) -> list[dict[str, Any]]:
    """Some steps, the latest all: `step` counted from the bad one, which is 0, and magnitudes by quantity."""
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
    """For a terminal."""
    shown = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    found = rows(history)
    for name in found[0]:
        shown.add_column("  step" if name == "step" else name.partition("/")[2] or name, justify="right", no_wrap=True)
    for row in found:
        shown.add_row(f"  {row['step']}", *[f"{x:.3g}" for name, x in row.items() if name != "step"])
    return shown


def lines(history: History) -> list[Text]:
    """Further remarks about a trend."""
    facts, folder = history.facts, history.incident.folder
    start = f"checkpoint {facts['from_iteration']}" if facts["from_iteration"] else "the beginning"
    said = [
        f"{facts['steps']} steps in {folder / 'history.npz'}",
        f"by training again from {start}; it begins {facts['begins']}",
        first_unusual(history),
    ]
    if facts["exact"]:
        return [Text(f"  {text}") for text in [*said, f"the bad step at its end: {facts['as_in_the_run']}"]]
    others = ", ".join(f"{name} {change}" for name, change in facts["other_versions"].items())
    why = f"other versions ({others})" if others else (
        "a GPU without deterministic=true, other code, guards of one's own, or a run resumed with another "
        "configuration can be why"
    )  # fmt: skip
    warning = Text(f"  not exact: {facts['as_in_the_run']}; {why}", style="bold yellow")
    return [*(Text(f"  {text}") for text in said), warning]


def as_data(history: History) -> dict[str, Any]:
    """The history as plain data for JSON; what is not finite becomes text."""
    plain = [{name: x if np.isfinite(x) else str(x) for name, x in row.items()} for row in rows(history)]
    kept = ("steps", "asked", "begins", "from_iteration", "exact", "as_in_the_run", "other_versions")
    return {
        "file": str(history.incident.folder / "history.npz"),
        **{name: history.facts[name] for name in kept},
        "first_unusual": first_unusual(history),
        "magnitudes": plain,
    }
