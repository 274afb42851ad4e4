"""Trains with wrong but finite numbers, by the plain commands: what is left of the return without them?

python -m scripts.glitch                            # all cells, one line per cell; resumes where it stopped
python -m scripts.glitch --only dense --seeds 8     # one task, more seeds
python -m scripts.glitch --side brax --rate 0.001   # Brax's PPO with the same settings
python -m scripts.glitch --page                     # the table of docs/survival.md from the results

All seeds of a cell train in one program, those of Brax's PPO one by one. Evaluations have no wrong numbers.
"""

import functools
import itertools
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlstable.policy import statistics
from scripts import faulted, pages, results, study
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.study import Cell
from scripts.survival.page import cell

SIDES = {side: title.removeprefix("guards=") for side, title in faulted.SIDES.items()}
SIZES = (30.0, 1e3, 4e4, 1e6)  # usual rewards
RATES = (1e-4, 1e-3, 1e-2)  # share of the environment steps
_QUIET = ("checkpoint=off", "eval.num_evals=5")


class Task(NamedTuple):
    text: str  # for the page
    overrides: tuple[str, ...]
    usual: float  # reward of a good step
    of_brax: bool = True  # whether its states have what Brax's PPO needs


def _point(kwargs: str) -> tuple[str, ...]:
    return ("env=import", "env.name=scripts.harm.environments:Point", f"env.kwargs={kwargs}", "env.episode_length=100")


TASKS = {
    "dense": Task("two coordinates, reward 1 minus the distance", (*_point("{size: 2}"), "total_steps=300000"), 1.0),
    "sparse": Task(
        "one coordinate, reward 1 within 0.05 of the goal only",
        (*_point("{reward: sparse}"), "total_steps=300000"),
        1.0,
    ),
    **{
        name: Task(f"`env={name}`", (f"env={name}", "total_steps=1000000"), usual)
        for name, usual in (("hopper", 3.0), ("halfcheetah", 5.0), ("walker2d", 3.0), ("swimmer", 0.3))
    },
    "quadruped": Task(
        "a robot's file",
        ("env=robot_velocity", "env.xml=tests/robot/models/quadruped.xml", "total_steps=1000000"),
        0.1,
        of_brax=False,
    ),
}


class Glitch(NamedTuple):
    name: str
    site: str
    value: float  # in usual rewards at the site `reward`


def _glitches() -> Iterator[Glitch]:
    yield Glitch("none", "reward", 0.0)
    for size in SIZES:
        for sign in (1.0, -1.0):
            yield Glitch(f"reward {sign * size:+,.0f}", "reward", sign * size)
    for size in (1e3, 1e6):
        yield Glitch(f"observation {size:,.0f}", "observation", size)
    yield Glitch("end of the episode", "done", 1.0)


GLITCHES = {glitch.name: glitch for glitch in _glitches()}


def train(task: str, side: str, glitch: Glitch, rate: float, seeds: range) -> Iterator[Row]:
    value = glitch.value * (TASKS[task].usual if glitch.site == "reward" else 1.0)
    fault = {"site": glitch.site, "value": value, "probability": rate} if rate else {}
    schedule = ("ppo.learning_rate_schedule=constant",) if side == "brax" else ()  # Brax has no falling rate
    return faulted.train([*TASKS[task].overrides, *_QUIET, *schedule], side, fault, seeds)


def shown(rows: Sequence[Row], task: str, side: str, glitch: str, rate: float) -> str:
    """The text of a cell, median and least share of the clean return; bold below 0.95 (0.85 at one in a hundred)."""
    clean = [row["return"] or 0.0 for row in results.matching(rows, task=task, side=side, glitch="none")]
    own = results.matching(rows, task=task, side=side, glitch=glitch, rate=rate)
    if not clean or not own:
        return ""
    median = float(np.median(clean))
    enough = min((row["return"] or 0.0) / median for row in own) >= (0.95 if rate < 1e-2 else 0.85)
    text = cell(own, median)[0].replace("*", "")
    return text if enough else f"**{text}**"


def without_glitches(rows: Sequence[Row], task: str) -> list[str]:
    """The cells about returns without wrong numbers; empty unless both sides have the same seeds."""
    sides = [results.matching(rows, task=task, side=side, rate=0.0) for side in ("off", "default")]
    off, default = ([row["return"] for row in own] for own in sides)
    if not off or len(off) != len(default):
        return []
    apart = pages.interval(statistics.estimate(np.subtract(default, off)), "{:+,.3g}".format)
    each = [f"{np.mean(own):,.4g} / {min(own):,.4g}" for own in (off, default)]
    acted = {name for own in sides[1] for name in own.get("acted", ())}
    return [task, str(len(off)), *each, apart, ", ".join(sorted(acted)) or "none"]


def write_page(rows: Sequence[Row], out: Path) -> None:
    lines = []
    for task, about in TASKS.items():
        pairs = itertools.product(SIDES, RATES)
        columns = [pair for pair in pairs if any(shown(rows, task, pair[0], name, pair[1]) for name in GLITCHES)]
        header = ("wrong number", *(f"{SIDES[side]}, 1 in {1 / rate:,.0f}" for side, rate in columns))
        table = {name: [shown(rows, task, side, name, rate) for side, rate in columns] for name in GLITCHES}
        if measured := pages.merged([(name, *texts) for name, texts in table.items() if any(texts)]):
            seeds = len(results.matching(rows, task=task, side="default", glitch="none"))
            lines += [f"### {task}: {about.text}", "", f"{seeds} seeds, `{' '.join(about.overrides)}`", ""]
            lines += [*pages.table(header, measured), ""]
    clean = [cells for task in TASKS if (cells := without_glitches(rows, task))]
    header = (
        "task without wrong numbers", "seeds", "off, mean / least", "default, mean / least", "difference [95 %]",
        "guards and limiters that acted",
    )  # fmt: skip
    lines += [*pages.table(header, clean), ""]
    pages.fill(out.with_name("survival.md"), {"glitches": "\n".join(lines).rstrip()})


def cells(asked: Namespace) -> Iterator[Cell]:
    names = dict.fromkeys(["none", *(asked.glitch or GLITCHES)])
    for task, glitch in itertools.product(asked.only or TASKS, map(GLITCHES.__getitem__, names)):
        sides = asked.side or [side for side in SIDES if side != "brax" or TASKS[task].of_brax]
        rates = (0.0,) if glitch.name == "none" else asked.rate or RATES
        for rate, side in itertools.product(rates, sides):
            about = {"task": task, "side": side, "glitch": glitch.name, "rate": rate}
            train_own = functools.partial(train, task, side, glitch, rate)
            yield Cell(" ".join(map(str, about.values())), about, range(asked.seeds), train_own)


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.study_parser(__doc__, Path("docs/glitch.jsonl"), 4, only=TASKS, side=SIDES, glitch=GLITCHES)
    parser.add_argument("--rate", action="append", type=float, choices=RATES, help="default: all")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    study.run(asked, cells(asked), write_page)


if __name__ == "__main__":
    main()
