"""Learning curves with guards and without: healthy training must not notice them.

python scripts/curves.py                          # every task, both sides; goes on where it stopped
python scripts/curves.py --task halfcheetah       # one task
python scripts/curves.py --page                   # docs/curves.md and its picture from what was measured

The seeds of a side are trained side by side by one compiled program.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import brax_rival
import jax
import numpy as np
import survival
import survival_page

from rlstable.compose import compose

Row = dict[str, Any]

_SMALL = (
    "network=small", "ppo.num_envs=64", "ppo.batch_size=64", "ppo.num_minibatches=8", "ppo.unroll_length=16",
    "ppo.num_updates_per_batch=4",
)  # fmt: skip
TASKS: dict[str, tuple[str, ...]] = {
    "inverted_pendulum": survival.STEADY,
    "halfcheetah": ("env=halfcheetah", "env.backend=spring", *_SMALL, "total_steps=204800"),
    "humanoid": ("env=humanoid", "env.backend=spring", *_SMALL, "total_steps=204800"),
}
SIDES = ("off", "default")
RESULTS = Path("docs/curves.jsonl")
LOOKS = 5
RESAMPLES = 10_000
_TEXT = """# Learning curves with guards and without

Written by `scripts/curves.py` from [curves.jsonl](curves.jsonl). The same healthy training with `guards=off` and with
`guards=default`, judged at equal distances by {episodes} episodes of the mean action.

The seeds are the same on both sides, but one rounding error makes them other trainings, so that the sides are compared
as two samples: the difference of the mean return over all looks, as a share of that of `guards=off`, with the 95 %
interval of a bootstrap over seeds. An interval that contains 0 is within seed noise; a wide one says that more seeds
are needed to tell.

![the curves](curves.png)

| task | final return, guards=off | guards=default | difference over the curve | trips |
| --- | ---: | ---: | ---: | --- |
"""


def run_task(task: str, side: str, seeds: Sequence[int], out: Path) -> None:
    """Trains the seeds of one side and adds a row for each."""
    config = compose([*TASKS[task], f"guards={side}", "devices=1"])
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


def difference(off: np.ndarray, default: np.ndarray) -> tuple[float, float, float]:
    """How much more the guarded seeds return over the whole curve, as a share, and its 95 % interval.

    Args:
        off: Returns, `[seeds, looks]`.
        default: Likewise.
    """
    rng = np.random.default_rng(0)
    means = [side.mean(axis=1) for side in (off, default)]

    def share(a: np.ndarray, b: np.ndarray) -> Any:
        return (b.mean(axis=-1) - a.mean(axis=-1)) / np.abs(a.mean(axis=-1))

    drawn = [rng.choice(side, (RESAMPLES, len(side))) for side in means]
    low, high = np.percentile(share(*drawn), [2.5, 97.5])
    return float(share(*means)), float(low), float(high)


def table(rows: Sequence[Row], task: str) -> str:
    """The task's line of the page."""
    off, default = (curves(rows, task, side) for side in SIDES)
    cells = []
    for side in (off, default):
        last = side[:, -1]
        cells.append(f"{np.median(last):,.0f} [{last.min():,.0f}, {last.max():,.0f}]")
    share, low, high = difference(off, default)
    trips = survival_page.trips([row for row in rows if (row["task"], row["side"]) == (task, "default")])
    return f"| {task} | {cells[0]} | {cells[1]} | {share:+.1%} [{low:+.1%}, {high:+.1%}] | {trips or 'none'} |"


def write(rows: Sequence[Row], results: Path, tasks: Mapping[str, tuple[str, ...]]) -> None:
    """Writes the page and the picture beside the results, of the tasks that have both sides."""
    whole = [task for task in tasks if all(len(curves(rows, task, side)) for side in SIDES)]
    if not whole:
        return
    text = _TEXT.format(episodes=survival.EPISODES)
    text += (
        "\n".join(table(rows, task) for task in whole) + "\n\nSettings, as `python -m rlstable.train` takes them:\n\n"
    )
    text += "\n".join(f"- `{' '.join(tasks[task])}`: {len(curves(rows, task, 'off'))} seeds" for task in whole)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "brax", "mujoco", "mujoco-mjx"))
    text += f"\n\nPython {platform.python_version()}, {versions}, on {jax.devices()[0].device_kind}.\n"
    (results.parent / "curves.md").write_text(text)
    _draw(rows, whole, results.parent / "curves.png")


def _draw(rows: Sequence[Row], tasks: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(tasks), figsize=(4 * len(tasks), 3), squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        steps = np.array(next(row["steps"] for row in rows if row["task"] == task)) / 1000
        for side, colour in zip(SIDES, ("tab:grey", "tab:blue"), strict=True):
            own = curves(rows, task, side)
            axes.fill_between(steps, own.min(axis=0), own.max(axis=0), color=colour, alpha=0.2, linewidth=0)
            axes.plot(steps, np.median(own, axis=0), color=colour, label=f"guards={side}")
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
    parser.add_argument("--task", choices=TASKS, action="append", help="all of them")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page and run nothing")
    asked = parser.parse_args(arguments)
    if asked.seeds < 2:
        parser.error(f"--seeds: {asked.seeds} has no spread; 8 is the default, 2 the least")
    brax_rival.keep_compiled_programs()
    for task in () if asked.page else asked.task or TASKS:
        for side in SIDES:
            known = len(curves(survival_page.read(asked.out), task, side))
            if known < asked.seeds:
                run_task(task, side, range(known, asked.seeds), asked.out)
    write(survival_page.read(asked.out), asked.out, TASKS)


if __name__ == "__main__":
    main()
