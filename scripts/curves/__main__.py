"""Learning curves of two sides: healthy training must notice neither guards nor float16.

python -m scripts.curves                          # every comparison, task and side; goes on where it stopped
python -m scripts.curves --only float16           # one comparison
python -m scripts.curves --task halfcheetah       # one task
python -m scripts.curves --page                   # docs/curves.md and its picture from what was measured

The seeds of a side are trained side by side by one compiled program.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.cli.compose import compose
from scripts.rivals import brax_rival
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page

Row = dict[str, Any]

_SMALL = (
    "network=small", "ppo.num_envs=64", "ppo.batch_size=64", "ppo.num_minibatches=8", "ppo.unroll_length=16",
    "ppo.num_updates_per_batch=4",
)  # fmt: skip
TASKS: dict[str, tuple[str, ...]] = {
    "inverted_pendulum": survival.STEADY,
    "halfcheetah": ("env=halfcheetah", "ppo=halfcheetah", "env.backend=spring", *_SMALL, "total_steps=204800"),
    "humanoid": ("env=humanoid", "ppo=humanoid", "env.backend=spring", *_SMALL, "total_steps=204800"),
}
RESULTS = Path("docs/curves.jsonl")
LOOKS = 5
RESAMPLES = 10_000
_TEXT = """# Learning curves

Written by `make curves` (`scripts/curves/`) from [curves.jsonl](curves.jsonl). The same healthy training from two
sides, judged at equal distances by {episodes} episodes of the mean action.

The seeds are the same on both sides, but one rounding error makes them other trainings, so that the sides are compared
as two samples: the difference of the mean return over all looks, as a share of that of the first side, with the 95 %
interval of a bootstrap over seeds. An interval that contains 0 is within seed noise; a wide one says that more seeds
are needed to tell. Where sides differ by little, seeds still have much in common, and the interval of the differences
seed by seed is narrower.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two sides of the same training.

    Attributes:
        title: Of its part of the page.
        sides: Overrides by the name that a side has in the results, the measure first.
        tasks: Those it is made on.
        more: Overrides of both sides.
        picture: Name of the file.
    """

    title: str
    sides: Mapping[str, tuple[str, ...]]
    tasks: tuple[str, ...]
    more: tuple[str, ...] = ()
    picture: str = "curves.png"

    def settings(self, task: str) -> tuple[str, ...]:
        """The overrides of a task, on either side."""
        return (*TASKS[task], *self.more)


COMPARISONS = {
    "guards": Comparison(
        "Guards",
        {"off": ("guards=off",), "default": ("guards=default",)},
        ("inverted_pendulum", "halfcheetah", "humanoid"),
    ),
    "float16": Comparison(
        "Networks in float16, with dynamic loss scaling",
        {"float32": ("precision=default",), "float16": ("precision=float16",)},
        ("inverted_pendulum",),
        # As configs/precision/float16.yaml advises; on both sides, so that they differ in nothing else.
        ("ppo.optimizer.eps=1e-5",),
        "curves_float16.png",
    ),
}


def run_task(of: Comparison, task: str, side: str, seeds: Sequence[int], out: Path) -> None:
    """Trains the seeds of one side and adds a row for each."""
    config = compose([*of.settings(task), *of.sides[side], "devices=1"])
    looks = list(survival.Arena(config, seeds, None).watch(survival.HEALTHY, LOOKS))
    steps = [config.total_steps * (look + 1) // LOOKS for look in range(LOOKS)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        for index, seed in enumerate(seeds):
            returns = [rows[index]["return"] for rows in looks]
            last = {name: looks[-1][index][name] for name in ("finite", "trips", "seconds")}
            row = {"task": task, "side": side, "seed": seed, "steps": steps, "returns": returns, **last}
            file.write(json.dumps(row) + "\n")
            print(f"{task:18} {side:8} seed {seed} returns {returns} {last['trips'] or ''}", flush=True)


def curves(rows: Sequence[Row], task: str, side: str) -> np.ndarray:
    """Returns by seed and look, `[seeds, looks]`; 0 where a policy made every simulation bad."""
    own = [[value or 0.0 for value in row["returns"]] for row in rows if (row["task"], row["side"]) == (task, side)]
    return np.array(own, dtype=float)


def difference(measure: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """How much more the other side returns over the whole curve, as a share, and its 95 % interval.

    Args:
        measure: Returns, `[seeds, looks]`.
        other: Likewise.
    """
    rng = np.random.default_rng(0)
    means = [side.mean(axis=1) for side in (measure, other)]

    def share(a: np.ndarray, b: np.ndarray) -> Any:
        return (b.mean(axis=-1) - a.mean(axis=-1)) / np.abs(a.mean(axis=-1))

    drawn = [rng.choice(side, (RESAMPLES, len(side))) for side in means]
    low, high = np.percentile(share(*drawn), [2.5, 97.5])
    return float(share(*means)), float(low), float(high)


def paired(measure: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The interval where every seed is compared with itself on the other side.

    Args:
        measure: Returns, `[seeds, looks]`.
        other: Likewise, of the same seeds.
    """
    pairs = np.stack([measure.mean(axis=1), other.mean(axis=1)])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(RESAMPLES, pairs.shape[1]))
    a, b = pairs[:, drawn].mean(axis=-1)
    low, high = np.percentile((b - a) / np.abs(a), [2.5, 97.5])
    return float(low), float(high)


def table(rows: Sequence[Row], of: Comparison, task: str) -> str:
    """The task's line of the page."""
    measure, other = (curves(rows, task, side) for side in of.sides)
    cells = []
    for side in (measure, other):
        last = side[:, -1]
        cells.append(f"{np.median(last):,.0f} [{last.min():,.0f}, {last.max():,.0f}]")
    share, low, high = difference(measure, other)
    seeds = min(len(measure), len(other))
    closer = "[{:+.1%}, {:+.1%}]".format(*paired(measure[:seeds], other[:seeds]))
    second = [*of.sides][1]
    trips = survival_page.trips([row for row in rows if (row["task"], row["side"]) == (task, second)])
    return (
        f"| {task} | {cells[0]} | {cells[1]} | {share:+.1%} [{low:+.1%}, {high:+.1%}] | {closer} | {trips or 'none'} |"
    )


def part(rows: Sequence[Row], of: Comparison, tasks: Sequence[str]) -> str:
    """A comparison's part of the page."""
    first, second = (" ".join(overrides) for overrides in of.sides.values())
    lines = [
        f"## {of.title}",
        "",
        f"`{first}` and `{second}`.",
        "",
        f"![the curves]({of.picture})",
        "",
        f"| task | final return, {first} | {second} | difference over the curve | seed by seed | trips |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(table(rows, of, task) for task in tasks),
        "",
        "Settings, as `python -m rlstable.train` takes them, and seeds:",
        "",
    ]
    for task in tasks:
        counts = " and ".join(str(len(curves(rows, task, side))) for side in of.sides)
        lines.append(f"- `{' '.join(of.settings(task))}`: {counts}")
    return "\n".join(lines)


def write(rows: Sequence[Row], results: Path, comparisons: Mapping[str, Comparison]) -> None:
    """Writes the page and the pictures beside the results, of the tasks that have both sides."""
    parts = []
    for of in comparisons.values():
        whole = [task for task in of.tasks if all(len(curves(rows, task, side)) for side in of.sides)]
        if whole:
            parts.append(part(rows, of, whole))
            _draw(rows, of, whole, results.parent / of.picture)
    if parts:
        text = "\n\n".join([_TEXT.format(episodes=survival.EPISODES).strip(), *parts, survival_page.machine()])
        (results.parent / "curves.md").write_text(f"{text}\n")


def _draw(rows: Sequence[Row], of: Comparison, tasks: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for side, colour in zip(of.sides, ("tab:grey", "tab:blue"), strict=True):
            steps = np.array(next(row["steps"] for row in rows if (row["task"], row["side"]) == (task, side))) / 1000
            own = curves(rows, task, side)
            axes.fill_between(steps, own.min(axis=0), own.max(axis=0), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, np.median(own, axis=0), color=colour, label=" ".join(of.sides[side]))
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("thousand environment steps", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("return: median and range of seeds", fontsize=8)
    panels[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is missing, then writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=COMPARISONS, action="append", metavar="COMPARISON", help="all of them")
    parser.add_argument("--task", choices=TASKS, action="append", help="all of them")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    asked = parser.parse_args(arguments)
    if asked.seeds < 2:
        parser.error(f"--seeds: {asked.seeds} has no spread; 8 is the default, 2 the least")
    brax_rival.keep_compiled_programs()
    for name in () if asked.page else asked.only or COMPARISONS:
        of = COMPARISONS[name]
        for task in (task for task in of.tasks if task in (asked.task or TASKS)):
            for side in of.sides:
                known = len(curves(survival_page.read(asked.out), task, side))
                if known < asked.seeds:
                    run_task(of, task, side, range(known, asked.seeds), asked.out)
    write(survival_page.read(asked.out), asked.out, COMPARISONS)


if __name__ == "__main__":
    main()
