"""Trains every task three to five times longer than it takes to solve: which policies stay good?

python -m scripts.stability                          # all missing seeds; resumes where it stopped
python -m scripts.stability --only hopper --seeds 2  # one task, fewer seeds
python -m scripts.stability --page                   # docs/stability.md and its picture from the results

A run is a process as a user starts it, with up to eight seeds in one program, in a temporary folder. Each seed is a row
of docs/stability.jsonl, and is not trained again. Delete the rows that a change makes stale.
"""

import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.envs.load import load_env
from scripts import results
from scripts.bench.leg import brax_settings
from scripts.process import ROOT, environment, watch
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.stability import page as stability_page
from scripts.stability.page import Task
from scripts.stability.tasks import PROBES, REWARD_FACTORS

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
    "inverted_pendulum": Task(_PENDULUM, seeds=32),
    "inverted_pendulum_3e-4": Task((*_PENDULUM, "ppo.learning_rate=3e-4"), seeds=32),
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
    # Not the factor ten of ppo=fast: the rewards are large already.
    "late_element": _probe("late_element", "ppo.learning_rate=1e-3", "total_steps=300000"),
    "large_rewards": _probe("large_rewards", "ppo.learning_rate=1e-3", "ppo.reward_scaling=1.0", "total_steps=300000"),
}


def settings_of(task: str, side: str) -> list[str]:
    if side == "brax":
        return [*TASKS[task].overrides]
    evaluations = (f"eval.num_evals={EVALUATIONS}", f"eval.num_envs={TASKS[task].episodes}", "eval.target_return=null")
    return [*TASKS[task].overrides, *evaluations, f"guards={side}"]


def missing(rows: Sequence[Row], task: str, side: str, seeds: range) -> range:
    """Returns the seeds from the first one without a row of the present settings on."""
    known = {row["seed"] for row in results.matching(rows, task=task, side=side, settings=settings_of(task, side))}
    return range(next((seed for seed in seeds if seed not in known), seeds.stop), seeds.stop)


def train(task: str, side: str, seeds: range) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        about = [f"seed={seeds.start}", f"seeds={len(seeds)}", f"hydra.run.dir={run}"]
        command = [sys.executable, "-m", "rlstable.train", *settings_of(task, side), *_QUIET, *about]
        done = watch(command, environment(PYTHONPATH=str(ROOT)), Path(name), math.inf)
        folders = [run / f"seed-{seed}" if len(seeds) > 1 else run for seed in seeds]
        if not all((own / "result.json").exists() for own in folders):
            raise ConfigError(f"{task} {side}: exit code {done.code}, {done.last_line or 'no output'}")
        return [seed_row(own, seed) for own, seed in zip(folders, seeds, strict=True)]


def seed_row(folder: Path, seed: int) -> Row:
    metrics, events = (results.read(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    evaluated = [row for row in metrics if "eval/episode_reward" in row]
    result = json.loads((folder / "result.json").read_text())
    return {
        "seed": seed,
        "steps": [row["step"] for row in evaluated],
        "returns": [row["eval/episode_reward"] for row in evaluated],
        "return_collapsed": len(results.matching(events, kind="return_collapsed")),
        "left": result.get("last_return", result["return"]),
        "stop_reason": result["stop_reason"],
        "steps_per_second": float(np.median([row["training/sps"] for row in metrics if row.get("training/sps")])),
    }


def train_brax(task: str, seeds: range) -> Iterator[Row]:
    """Trains the seeds with Brax's PPO, one after another, and evaluates the policies at equal distances."""
    config = compose([*settings_of(task, "brax"), "devices=1"])
    env = load_env(config.env)
    for seed in seeds:
        saved: list[tuple[int, Any]] = []
        error, make_policy, _ = brax_rival.train(
            env, env, brax_settings(config, seed), EVALUATIONS, lambda *found, saved=saved: saved.append(found)
        )
        if not saved:
            raise ConfigError(f"{task} brax: {error}")
        evaluate = brax_rival.make_evaluation(env, make_policy, TASKS[task].episodes, config.env.episode_length)
        steps, returns = [step for step, _ in saved], [evaluate(params) for _, params in saved]
        yield {"seed": seed, "steps": steps, "returns": returns, "stop_reason": error or "completed"}


def run(task: str, side: str, seeds: range, out: Path) -> None:
    started = time.perf_counter()
    versions = {name: text for name, text in results.versions().items() if name != "rlstable"}
    about = {"settings": settings_of(task, side), "commit": results.commit(), "versions": versions}
    about["device"] = results.device()
    for rows in ([row] for row in train_brax(task, seeds)) if side == "brax" else [train(task, side, seeds)]:
        results.add(out, [{"task": task, "side": side, **row, **about} for row in rows])
        for row in rows:
            returns = [value for value in row["returns"] if value is not None] or [float("nan")]
            ended = f"seed {row['seed']} last {returns[-1]:.1f} best {max(returns):.1f} {row['stop_reason']}"
            print(f"{task:24} {side:8} {ended} ({time.perf_counter() - started:.0f} s)", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = results.study_parser(__doc__, Path("docs/stability.jsonl"), only=TASKS, side=stability_page.TITLES)
    parser.add_argument("--seeds", type=int, help="default: 8, of the inverted pendulum 32")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    failed = 0
    for task in () if asked.page else asked.only or TASKS:
        count = asked.seeds or TASKS[task].seeds
        sides = [side for side in asked.side or stability_page.TITLES if side != "brax" or not TASKS[task].scaled]
        for start, side in itertools.product(range(0, count, SIDE_BY_SIDE), sides):
            seeds = missing(results.read(asked.out), task, side, range(start, min(count, start + SIDE_BY_SIDE)))
            try:
                if seeds:
                    run(task, side, seeds, asked.out)
            except ConfigError as error:
                failed += 1
                print(f"stability: {error}", file=sys.stderr, flush=True)
    stability_page.write(results.read(asked.out), TASKS, asked.out)
    if failed:
        sys.exit(f"stability: {failed} of the runs failed; run it again to retry them")


if __name__ == "__main__":
    main()
