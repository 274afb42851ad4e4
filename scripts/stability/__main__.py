"""Trains every task three to five times longer than it takes to solve: which policies stay good?

python -m scripts.stability                          # all missing seeds; resumes where it stopped
python -m scripts.stability --only hopper --seeds 2  # one task, fewer seeds
python -m scripts.stability --page                   # docs/stability.md and its picture from the results

A run is a process as a user starts it, with up to eight seeds in one program, in a temporary folder. Each seed is a row
of docs/stability.jsonl, and is not trained again. Delete the rows that a change makes stale.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from scripts import results, study
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.stability import page as stability_page
from scripts.stability.page import Task
from scripts.stability.tasks import PROBES, REWARD_FACTORS
from scripts.study import Cell, Run

EVALUATIONS = 16
SIDE_BY_SIDE = 8
# The seeds are vmapped, and incidents have one slot for all.
_QUIET = (
    "logging=quiet", "devices=1", "checkpoint.every=1000000", "checkpoint.keep_best=0", "checkpoint.confirm_best=0",
    "supervise.incident.enabled=false",
)  # fmt: skip
_SCALED = (
    "ppo.learning_rate=1e-3", "ppo.reward_scaling=1.0", "ppo.normalize_values=true", "ppo.normalize_advantage=true",
    "total_steps=300000",
)  # fmt: skip
_PENDULUM = ("env=inverted_pendulum", "ppo=inverted_pendulum", "total_steps=400000")


def _probe(name: str, *more: str) -> Task:
    probe = PROBES[name]
    kwargs = ", ".join(f"{key}: {value}" for key, value in probe.kwargs.items())
    env = ("env=import", f"env.name=scripts.stability.tasks:{probe.name}", f"env.episode_length={probe.episode_length}")
    given = (f"env.kwargs={{{kwargs}}}",) if kwargs else ()
    return Task((*env, *given, "ppo=fast", "network=small", *more), best=probe.best)


TASKS: dict[str, Task] = {
    "inverted_pendulum": Task(_PENDULUM),
    "inverted_pendulum_3e-4": Task((*_PENDULUM, "ppo.learning_rate=3e-4")),
    "inverted_double_pendulum": Task(("env=inverted_double_pendulum", "total_steps=1000000")),
    "reacher": Task(
        ("env=reacher", "total_steps=800000"),
        from_start=True,
        episodes=128,  # because returns scatter
    ),
    "walker2d": Task(("env=walker2d", "total_steps=1000000")),
    "swimmer": Task(("env=swimmer", "total_steps=600000")),
    "hopper": Task(("env=hopper", "total_steps=1000000")),
    "halfcheetah": Task(("env=halfcheetah", "total_steps=600000")),
    "ant": Task(("env=ant", "total_steps=2000000")),
    "fast": Task(("env=fast", "total_steps=160000")),
    "point_mass": _probe("point_mass", "ppo.learning_rate=1e-3", "total_steps=300000"),
    "critic_too_small": _probe("critic_too_small", "ppo.discounting=0.97", "total_steps=600000"),
    "solved_constant": _probe("solved_constant", "ppo.learning_rate=1e-3", "total_steps=300000"),
    "rare_kick": _probe("rare_kick", "ppo.learning_rate=1e-3", "total_steps=600000"),
    **{
        f"inverted_pendulum_rewards_x{factor:g}": Task(
            (*_PENDULUM[:2], "ppo.normalize_values=true", f"ppo.reward_scaling={0.1 * factor:g}"),
            best=1000.0,
            scaled=("inverted pendulum", factor),
        )
        for factor in REWARD_FACTORS
    },
    **{
        f"point_mass_rewards_x{factor:g}": dataclasses.replace(
            _probe(f"rewards_x{factor:g}", *_SCALED), scaled=("point mass", factor)
        )
        for factor in REWARD_FACTORS
    },
    # One minibatch of all samples, and an unroll as long as the episode: a fall after a quick rise, with any seed.
    "quick_rise": Task(
        (
            "env=import",
            "env.name=scripts.harm.environments:Point",
            "env.kwargs={size: 2, strength: 3}",
            "env.episode_length=20",
            "ppo=fast",
            "network=small",
            "ppo.num_envs=32",
            "ppo.unroll_length=20",
            "ppo.batch_size=32",
            "ppo.num_minibatches=1",
            "ppo.reward_scaling=1",
            "total_steps=300000",
        )
    ),
    # Not the factor ten of ppo=fast: the rewards are large already.
    "late_element": _probe("late_element", "ppo.learning_rate=1e-3", "total_steps=300000"),
    "large_rewards": _probe("large_rewards", "ppo.learning_rate=1e-3", "ppo.reward_scaling=1.0", "total_steps=300000"),
}


def settings_of(task: str, side: str) -> list[str]:
    if side == "brax":
        return [*TASKS[task].overrides]
    evaluations = (f"eval.num_evals={EVALUATIONS}", f"eval.num_envs={TASKS[task].episodes}", "eval.target_return=null")
    return [*TASKS[task].overrides, *evaluations, f"guards={side}"]


def train(task: str, side: str, seeds: range) -> Iterator[Row]:
    settings = settings_of(task, side)
    if side == "brax":
        yield from brax_rival.train(settings, seeds, EVALUATIONS, TASKS[task].episodes)
    else:
        with study.trained([*settings, *_QUIET], seeds) as (runs, _):
            yield from map(row_of, runs)


def row_of(run: Run) -> Row:
    result, collapses = run.result, run.events("return_collapsed")
    left = result.get("last_return", result["return"])
    about = {"return_collapsed": collapses, "trips": run.events("guard_tripped"), "left": left}
    about |= {"stop_reason": result["stop_reason"]}
    return {"seed": run.seed, **run.curve(), **about}


def cells(tasks: Iterable[str], sides: Iterable[str], count: int) -> Iterator[Cell]:
    for task in tasks:
        own = [side for side in sides if side != "brax" or not TASKS[task].scaled]
        for start, side in itertools.product(range(0, count, SIDE_BY_SIDE), own):
            about = {"task": task, "side": side, "settings": settings_of(task, side)}
            seeds = range(start, min(count, start + SIDE_BY_SIDE))
            yield Cell(f"{task} {side}", about, seeds, functools.partial(train, task, side))


def main(argv: Sequence[str] | None = None) -> None:
    sides = stability_page.TITLES
    parser = results.study_parser(__doc__, Path("docs/stability.jsonl"), 8, only=TASKS, side=sides)
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    wanted = cells(asked.only or TASKS, asked.side or sides, asked.seeds)
    study.run(asked, wanted, lambda rows, out: stability_page.write(rows, TASKS, out))


if __name__ == "__main__":
    main()
