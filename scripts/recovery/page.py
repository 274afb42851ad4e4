"""The page and the picture of recovery, from its results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from scripts import pages
from scripts.results import Row, matching

_LABELS = {
    "clean": "the rate of the task, watched, supervised",
    "unwatched": "0.3, not watched",
    "unsupervised": "0.3, watched, no second attempt",
    "supervised": "0.3, watched, supervised",
    "limited": "0.3, guards=default, no second attempt",
}


def spread(numbers: Sequence[float], form: str = ",.0f") -> str:
    return f"{np.median(numbers):{form}} [{min(numbers):{form}}, {max(numbers):{form}}]"


def _cells(case: str, rows: Sequence[Row], clean: float) -> tuple[str, ...]:
    """Returns a case's row of the table; `clean` is the median return of the clean runs."""
    endings = ", ".join(f"`{name}` {count}" for name, count in Counter(row["ending"] for row in rows).items())
    last = [row["return"] or 0.0 for row in rows]
    best = [row["best"] for row in rows if row["best"] is not None]
    saved = spread(best) if len(best) == len(rows) else f"none in {len(rows) - len(best)} of {len(rows)}"
    rollbacks, rates = [len(row["remedies"]) for row in rows], [row["rate"] for row in rows]
    share = spread([value / clean for value in last], ".2f")
    return _LABELS.get(case, case), endings, spread(last), share, saved, spread(rollbacks), spread(rates, ".2g")


def _seeds(rows: Sequence[Row]) -> list[str]:
    """Returns the table of seeds: the causes of rollbacks and the remedies in order."""
    cells = []
    for row in rows:
        values = ["none" if row[key] is None else f"{row[key]:,.0f}" for key in ("return", "best")]
        causes, remedies = ", ".join(f"`{cause}`" for cause in row["causes"]), ", ".join(row["remedies"])
        cells.append((str(row["seed"]), causes, remedies or "none", f"{row['lost_steps']:,}", *values))
    header = ("seed", "cause", "remedies, in order", "steps given up", "last policy", "best")
    return pages.table(header, cells, range(len(header)))


def write(rows: Sequence[Row], cases: Mapping[str, tuple[str, ...]], task: Sequence[str], results: Path) -> None:
    """Writes the page and the picture beside the results, if there are clean runs."""
    by = {case: own for case in cases if (own := matching(rows, case=case))}
    if "clean" not in by:
        return
    clean = float(np.median([row["return"] or 0.0 for row in by["clean"]]))
    header = ("rate and guards", "ending", "last policy", "share", "best policy", "rollbacks", "last learning rate")
    lines = pages.table(header, (_cells(case, own, clean) for case, own in by.items()), (0, 1))
    if "supervised" in by:
        lines += ["", "Rollbacks of each supervised seed:", "", *_seeds(by["supervised"])]
    lines += ["", f"Settings, as `python -m rlstable.train` takes them, after `{' '.join(task)}`:", ""]
    lines += [f"- {_LABELS.get(case, case)}: `{' '.join(cases[case])}`, {len(own)} seeds" for case, own in by.items()]
    pages.fill(results.parent / "recovery.md", {"results": "\n".join([*lines, "", pages.machine()])})
    _draw(by, results.parent / "recovery.png")


def _draw(by: Mapping[str, Sequence[Row]], path: Path) -> None:
    layout = {"ncols": len(by), "figsize": (2.7 * len(by), 2.8), "sharey": True, "squeeze": False}
    with pages.picture(path, **layout) as (_, panels):
        for axes, (case, rows) in zip(panels[0], by.items(), strict=True):
            for row in rows:
                # A run without a good state has only its last point, because bad states are not evaluated.
                points = [*row["curve"], (row["steps"], row["return"] or 0.0)]
                steps, returns = np.array(points, dtype=float).T / [[1000], [1]]
                end = "o" if row["ending"] == "completed" else "X"
                axes.plot(steps, returns, color="tab:blue", linewidth=1, alpha=0.8)
                axes.plot(steps[-1], returns[-1], end, color="tab:blue" if end == "o" else "tab:red")
                ticks = np.array(row["back_at"]) / 1000
                axes.plot(ticks, [-60] * len(ticks), "|", color="black", markersize=7)
            axes.set_xlim(0, 1.05 * max(row["steps"] for own in by.values() for row in own) / 1000)
            axes.set_title("\n".join(_LABELS.get(case, case).split(", ", 1)), fontsize=8)
            pages.plain(axes, "thousand steps")
        panels[0][0].set_ylabel("return, every seed", fontsize=8)
