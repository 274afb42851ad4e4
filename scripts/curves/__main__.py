"""Compares learning curves with guards and without, and in float32 and float16.

python -m scripts.curves                          # all comparisons, tasks and sides; resumes where it stopped
python -m scripts.curves --only float16           # one comparison
python -m scripts.curves --task halfcheetah       # one task
python -m scripts.curves --page                   # docs/curves.md and its pictures from the results

One compiled program trains all seeds of a side at once.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.cli.compose import compose
from scripts import arguments, pages, results
from scripts.results import Row, matching
from scripts.rivals import brax_rival
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page

_SMALL = (
    "network=small", "ppo.num_envs=64", "ppo.batch_size=64", "ppo.num_minibatches=8", "ppo.unroll_length=16",
    "ppo.num_updates_per_batch=4",
)  # fmt: skip
TASKS: dict[str, tuple[str, ...]] = {
    "inverted_pendulum": survival.STEADY,
    "halfcheetah": ("env=halfcheetah", "ppo=halfcheetah", "env.backend=spring", *_SMALL, "total_steps=204800"),
    "humanoid": ("env=humanoid", "ppo=humanoid", "env.backend=spring", *_SMALL, "total_steps=204800"),
}
EVALUATIONS = 5
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two sides of the same training."""

    title: str  # heading of its part of the page
    sides: Mapping[str, tuple[str, ...]]  # overrides by side; the first side is the baseline
    tasks: tuple[str, ...]  # names of its tasks
    more: tuple[str, ...] = ()  # overrides of both sides
    picture: str = "curves.png"  # file name of the picture

    def settings(self, task: str) -> tuple[str, ...]:
        """Returns the overrides of a task that both sides share."""
        return (*TASKS[task], *self.more)


COMPARISONS = {
    "guards": Comparison("Guards", {"off": ("guards=off",), "default": ("guards=default",)}, tuple(TASKS)),
    "float16": Comparison(
        "Networks in float16, with dynamic loss scaling",
        {"float32": ("precision=default",), "float16": ("precision=float16",)},
        ("inverted_pendulum",),
        ("ppo.optimizer.eps=1e-5",),  # as configs/precision/float16.yaml advises
        "curves_float16.png",
    ),
}


def run_task(comparison: Comparison, task: str, side: str, seeds: Sequence[int], out: Path) -> None:
    """Trains the seeds of one side and adds a row for each."""
    config = compose([*comparison.settings(task), *comparison.sides[side], "devices=1"])
    evaluations = list(survival.Arena(config, seeds, None).watch(survival.HEALTHY, EVALUATIONS))
    steps = [config.total_steps * (number + 1) // EVALUATIONS for number in range(EVALUATIONS)]
    for index, seed in enumerate(seeds):
        returns = [rows[index]["return"] for rows in evaluations]
        last = {name: evaluations[-1][index][name] for name in ("finite", "trips", "seconds")}
        results.add(out, [{"task": task, "side": side, "seed": seed, "steps": steps, "returns": returns, **last}])
        print(f"{task:18} {side:8} seed {seed} returns {returns} {last['trips'] or ''}", flush=True)


def curves(rows: Sequence[Row], task: str, side: str) -> np.ndarray:
    """Returns, `[seeds, evaluations]`; 0 where every simulation went bad."""
    own = matching(rows, task=task, side=side)
    return np.array([[value or 0.0 for value in row["returns"]] for row in own], dtype=float)


def difference(baseline: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """Returns how much more the other side returns over the curve, as a share, and its 95 % interval."""
    rng = np.random.default_rng(0)
    means = [side.mean(axis=1) for side in (baseline, other)]

    def share(a: np.ndarray, b: np.ndarray) -> Any:
        return (b.mean(axis=-1) - a.mean(axis=-1)) / np.abs(a.mean(axis=-1))

    drawn = [rng.choice(side, (_RESAMPLES, len(side))) for side in means]
    low, high = np.percentile(share(*drawn), [2.5, 97.5])
    return float(share(*means)), float(low), float(high)


def paired(baseline: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Returns the interval of the same share if every seed is compared with itself on the other side."""
    pairs = np.stack([baseline.mean(axis=1), other.mean(axis=1)])
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    a, b = pairs[:, drawn].mean(axis=-1)
    low, high = np.percentile((b - a) / np.abs(a), [2.5, 97.5])
    return float(low), float(high)


def _cells(rows: Sequence[Row], comparison: Comparison, task: str) -> tuple[str, ...]:
    sides = [curves(rows, task, side) for side in comparison.sides]
    last = [side[:, -1] for side in sides]
    finals = [f"{np.median(own):,.0f} [{own.min():,.0f}, {own.max():,.0f}]" for own in last]
    share, low, high = difference(*sides)
    seeds = min(map(len, sides))
    by_seed = "[{:+.1%}, {:+.1%}]".format(*paired(*(side[:seeds] for side in sides)))
    trips = survival_page.trips(matching(rows, task=task, side=[*comparison.sides][1])) or "none"
    return task, *finals, f"{share:+.1%} [{low:+.1%}, {high:+.1%}]", by_seed, trips


def _part(rows: Sequence[Row], comparison: Comparison, tasks: Sequence[str]) -> str:
    first, second = (" ".join(overrides) for overrides in comparison.sides.values())
    header = ("task", f"final return, {first}", second, "difference over the curve", "seed by seed", "trips")
    table = pages.table(header, (_cells(rows, comparison, task) for task in tasks), (0, 5))
    lines = [f"## {comparison.title}", "", f"`{first}` and `{second}`.", "", f"![the curves]({comparison.picture})", ""]
    lines += [*table, "", "Settings, as `python -m rlstable.train` takes them, and seeds:", ""]
    for task in tasks:
        counts = " and ".join(str(len(curves(rows, task, side))) for side in comparison.sides)
        lines.append(f"- `{' '.join(comparison.settings(task))}`: {counts}")
    return "\n".join(lines)


def write(rows: Sequence[Row], out: Path, comparisons: Mapping[str, Comparison]) -> None:
    """Writes the page and the pictures beside the results, with the tasks that have both sides."""
    parts = []
    for comparison in comparisons.values():
        tasks = [task for task in comparison.tasks if all(len(curves(rows, task, side)) for side in comparison.sides)]
        if tasks:
            parts.append(_part(rows, comparison, tasks))
            _draw(rows, comparison, tasks, out.parent / comparison.picture)
    if parts:
        pages.fill(out.parent / "curves.md", {"results": "\n\n".join([*parts, pages.machine()])})


def _draw(rows: Sequence[Row], comparison: Comparison, tasks: Sequence[str], path: Path) -> None:
    with pages.picture(path, ncols=len(tasks), figsize=(4 * len(tasks), 3), squeeze=False) as (_, panels):
        for axes, task in zip(panels[0], tasks, strict=True):
            for (side, overrides), colour in zip(comparison.sides.items(), ("tab:grey", "tab:blue"), strict=True):
                steps = np.array(matching(rows, task=task, side=side)[0]["steps"]) / 1000
                own = curves(rows, task, side)
                axes.fill_between(steps, own.min(axis=0), own.max(axis=0), color=colour, alpha=0.2, linewidth=0)
                axes.plot(steps, np.median(own, axis=0), color=colour, label=" ".join(overrides))
            axes.set_title(task, fontsize=10)
            pages.plain(axes, "thousand environment steps")
        panels[0][0].set_ylabel("return: median and range of seeds", fontsize=8)
        panels[0][0].legend(fontsize=8, frameon=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments.study_parser(__doc__, Path("docs/curves.jsonl"))
    arguments.add_choice(parser, "--only", COMPARISONS, metavar="COMPARISON")
    arguments.add_choice(parser, "--task", TASKS)
    parser.add_argument("--seeds", type=arguments.whole(2), default=8, help="default: 8")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    for name in () if asked.page else asked.only or COMPARISONS:
        comparison = COMPARISONS[name]
        for task in (task for task in comparison.tasks if task in (asked.task or TASKS)):
            for side in comparison.sides:
                known = len(curves(results.read(asked.out), task, side))
                if known < asked.seeds:
                    run_task(comparison, task, side, range(known, asked.seeds), asked.out)
    write(results.read(asked.out), asked.out, COMPARISONS)


if __name__ == "__main__":
    main()
