"""The page and the picture of recovery, from its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page

Row = dict[str, Any]
_LABELS = {
    "clean": "the rate of the task, watched, supervised",
    "unwatched": "0.3, nobody watches",
    "unsupervised": "0.3, watched, no second attempt",
    "supervised": "0.3, watched, supervised",
    "limited": "0.3, guards=default, no second attempt",
}
_TEXT = """# A learning rate far too high, and the way back

Written by `make recovery` (`scripts/recovery/`) from [recovery.jsonl](recovery.jsonl). The inverted pendulum with a
learning rate of 0.3 in place of 3e-4, an exponent lost in typing. No guard can cure that, since every number is finite;
what bounds steps (`guards.limiters.kl`, `guards.limiters.update_norm`) can. *Watched* is Brax's PPO without these and
all others, `guards=off` with the three guards that only look at what comes out: `guards.finite_state`, `guards.policy`
and `guards.value_loss`. *Supervised* is [what runs do by default](supervisor.md).

The last policy of every run is judged by {episodes} episodes of the mean action, and so is its best, which
`rlstable.load_policy` gives; "none" where no state was ever worth saving. A cell is the median over seeds, with the
least and greatest in brackets; the share is that of the median clean return.

![returns over steps](recovery.png)

Dots are runs that trained all their steps, crosses those that ended by name, ticks below the curves where a run went
back; steps that were given up are counted. A supervised run ends with a rate at which no guard trips any more, which
need not be the best one: there are remedies for a run that is lost, and no search for good settings.

| rate and guards | ending | last policy | share | best policy | went back | learning rate at the end |
| --- | --- | ---: | ---: | ---: | ---: | ---: |
"""


def spread(numbers: Sequence[float], form: str = ",.0f") -> str:
    """The median, and the range in brackets."""
    return f"{np.median(numbers):{form}} [{min(numbers):{form}}, {max(numbers):{form}}]"


def line(case: str, rows: Sequence[Row], clean: float) -> str:
    """A case's line of the page.

    Args:
        case: Its name.
        rows: Its seeds.
        clean: The median clean return.
    """
    names = [row["ending"] for row in rows]
    endings = ", ".join(f"`{name}` {names.count(name)}" for name in dict.fromkeys(names))
    last = [row["return"] or 0.0 for row in rows]
    best = [row["best"] for row in rows if row["best"] is not None]
    kept = spread(best) if len(best) == len(rows) else f"none in {len(rows) - len(best)} of {len(rows)}"
    back, rates = [len(row["remedies"]) for row in rows], [row["rate"] for row in rows]
    share = spread([value / clean for value in last], ".2f")
    label = _LABELS.get(case, case)
    return f"| {label} | {endings} | {spread(last)} | {share} | {kept} | {spread(back)} | {spread(rates, '.2g')} |"


def seeds(rows: Sequence[Row]) -> str:
    """Every seed that went back: why, and what was tried in which order."""
    lines = ["| seed | cause | remedies, in order | steps given up | last policy | best |", "| --- " * 6 + "|"]
    for row in rows:
        values = ["none" if row[key] is None else f"{row[key]:,.0f}" for key in ("return", "best")]
        causes, remedies = ", ".join(f"`{cause}`" for cause in row["causes"]), ", ".join(row["remedies"])
        lines.append(
            f"| {row['seed']} | {causes} | {remedies or 'none'} | {row['lost_steps']:,} | {' | '.join(values)} |"
        )
    return "\n".join(lines)


def write(rows: Sequence[Row], cases: Mapping[str, tuple[str, ...]], task: Sequence[str], results: Path) -> None:
    """Writes the page and the picture beside the results.

    Args:
        rows: The results.
        cases: Overrides by name, in order; the measure is `clean`.
        task: The overrides of all.
        results: The file they are from.
    """
    by = {case: own for case in cases if (own := [row for row in rows if row["case"] == case])}
    if "clean" not in by:
        return
    clean = float(np.median([row["return"] or 0.0 for row in by["clean"]]))
    text = _TEXT.format(episodes=survival.EPISODES)
    text += "\n".join(line(case, own, clean) for case, own in by.items())
    if "supervised" in by:
        text += "\n\nHow each seed found its way back:\n\n" + seeds(by["supervised"])
    text += f"\n\nSettings, as `python -m rlstable.train` takes them, after `{' '.join(task)}`:\n\n"
    text += "\n".join(f"- {_LABELS.get(case, case)}: `{' '.join(cases[case])}`, {len(by[case])} seeds" for case in by)
    (results.parent / "recovery.md").write_text(f"{text}\n\n{survival_page.machine()}\n")
    _draw(by, results.parent / "recovery.png")


def _draw(by: Mapping[str, Sequence[Row]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(by), figsize=(2.7 * len(by), 2.8), sharey=True, squeeze=False)
    for axes, (case, rows) in zip(panels[0], by.items(), strict=True):
        for row in rows:
            # A state that a guard calls bad is not evaluated, so that a run without a good one has but its end.
            points = [*row["curve"], (row["steps"], row["return"] or 0.0)]
            steps, returns = np.array(points, dtype=float).T / [[1000], [1]]
            end = "o" if row["ending"] == "completed" else "X"
            axes.plot(steps, returns, color="tab:blue", linewidth=1, alpha=0.8)
            axes.plot(steps[-1], returns[-1], end, color="tab:blue" if end == "o" else "tab:red")
            axes.plot(np.array(row["back_at"]) / 1000, [-60] * len(row["back_at"]), "|", color="black", markersize=7)
        axes.set_xlim(0, 1.05 * max(row["steps"] for own in by.values() for row in own) / 1000)
        axes.set_title("\n".join(_LABELS.get(case, case).split(", ", 1)), fontsize=8)
        axes.set_xlabel("thousand steps", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("return, every seed", fontsize=8)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
