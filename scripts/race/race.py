"""Whole processes beside each other: ours, Brax's PPO, SB3's, SBX's and RSL-RL's, each as a user starts it.

python -m scripts.bench race                                          # all of it, hours; goes on where it stopped
python -m scripts.bench race --task ant --side ours --side brax       # some tasks, some sides
python -m scripts.bench race --measure threshold --rounds 5

Every leg is a line of docs/race.jsonl as soon as it ends. A leg that is there, for this kind of device, these versions
and settings, is not run again; to have it measured anew, take its line away.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from scripts.race.legs import ON_GPU, Leg, Row, Workshop
from scripts.race.process import python_of
from scripts.race.results import RIVALS, add, commit, device, identity, measured, read

SIDES = ("ours", *RIVALS, "floor")
MEASURES = ("start", "threshold")
LIMIT = 1800.0
# Who is also measured with what an earlier process had compiled.
WARM = {"start": ("ours", "brax"), "threshold": ("ours",)}


@dataclasses.dataclass(frozen=True)
class Start:
    """The same task, hyperparameters and networks for every side.

    Attributes:
        settings: Overrides of `rlstable.train`.
        cut: More of them on a CPU, where a published iteration is a long wait.
        iterations: How many are run.
        ours: Physics of ours, as `env.backend` names it, native on a CPU alone; Brax's has the first. Empty: no choice.
        rsl_rl: Whether RSL-RL's is measured too, in the physics of Brax's and on a GPU alone.
    """

    settings: tuple[str, ...]
    cut: tuple[str, ...] = ()
    iterations: int = 24
    ours: tuple[str, ...] = ("mjx", "native")
    rsl_rl: bool = False


@dataclasses.dataclass(frozen=True)
class Goal:
    """A return to be reached, by each side in its own way.

    Attributes:
        threshold: Mean return of a deterministic evaluation.
        sides: Settings by side and case; a side that is not there does not run.
        limit: Seconds from the start of the process.
    """

    threshold: float
    sides: Mapping[tuple[str, str], tuple[str, ...] | Mapping[str, Any]]
    limit: float = LIMIT


START = {
    "fast": Start(("env=fast",), iterations=48, ours=()),
    "inverted_pendulum": Start(("env=inverted_pendulum", "ppo=inverted_pendulum_brax"), ("ppo.batch_size=128",)),
    "ant": Start(("env=ant", "ppo=ant"), ("ppo.num_envs=256", "ppo.batch_size=64"), rsl_rl=True),
    "humanoid": Start(
        ("env=humanoid", "ppo=humanoid"),
        ("ppo.num_envs=256", "ppo.batch_size=128", "ppo.num_minibatches=4"),
        rsl_rl=True,
    ),
}

# Ten episodes or more per evaluation everywhere, and between two evaluations more training than evaluating.
_OURS = ("recipe_for=cpu", "eval.num_envs=10")
_BRAX = ("total_steps=10_000_000", "eval.num_evals=100", "eval.num_envs=10", "ppo.num_envs=256")
# What is published, but for evaluations, of which there is one after every iteration.
_PUBLISHED = ("total_steps=50_000_000", "eval.num_evals=200", "eval.num_envs=10")

# RL Baselines3 Zoo, hyperparams/ppo.yml, commit 00128b5d: "tuned" for HalfCheetah-v3 and Hopper-v3, and its
# defaults of SB3 with normalisation for Ant-v3.
_NETWORKS = {
    "log_std_init": -2, "ortho_init": False, "activation_fn": "relu", "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}  # fmt: skip
_LOOKS = {"episodes": 10}
_PENDULUM = _LOOKS | {
    "env": "InvertedPendulum-v5", "num_envs": 8, "normalize": False, "evaluate_every": 2,
    "ppo": {"n_steps": 256, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3},
}  # fmt: skip
_ANT = _LOOKS | {"env": "Ant-v5", "num_envs": 1, "normalize": True, "evaluate_every": 10, "ppo": {}}
_CHEETAH = _LOOKS | {
    "env": "HalfCheetah-v5", "num_envs": 1, "normalize": True, "evaluate_every": 40,
    "ppo": {
        "batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096,
        "policy_kwargs": _NETWORKS,
    },
}  # fmt: skip
_HOPPER = _LOOKS | {
    "env": "Hopper-v5", "num_envs": 1, "normalize": True, "evaluate_every": 40,
    "ppo": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519,
        "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671,
        "policy_kwargs": _NETWORKS,
    },
}  # fmt: skip

THRESHOLD = {
    "inverted_pendulum": Goal(
        950.0,
        {
            ("ours", ""): ("env=inverted_pendulum",),
            ("brax", ""): (
                "env=inverted_pendulum",
                "env.backend=generalized",
                "total_steps=1_000_000",
                "eval.num_evals=50",
            ),
            ("brax", "published"): (
                "env=inverted_pendulum",
                "ppo=inverted_pendulum_brax",
                "env.backend=generalized",
                "total_steps=2_000_000",
                "eval.num_evals=19",
                "eval.num_envs=10",
            ),
            ("sb3", ""): _PENDULUM,
            ("sbx", ""): _PENDULUM,
        },
        limit=600.0,
    ),
    "ant": Goal(
        1500.0,
        {
            ("ours", ""): ("env=ant", *_OURS, "eval.num_evals=40"),
            ("brax", ""): ("env=ant", "ppo=ant", "env.backend=spring", *_BRAX, "ppo.batch_size=64"),
            ("brax", "published"): ("env=ant", "ppo=ant", "env.backend=spring", *_PUBLISHED),
            ("brax", "mjx"): ("env=ant", "ppo=ant", "env.backend=mjx", *_BRAX, "ppo.batch_size=64"),
            ("sb3", ""): _ANT,
            ("sbx", ""): _ANT,
        },
    ),
    "halfcheetah": Goal(
        1500.0,
        {
            ("ours", ""): ("env=halfcheetah", *_OURS, "eval.num_evals=40"),
            ("brax", ""): ("env=halfcheetah", "ppo=halfcheetah", "env.backend=spring", *_BRAX, "ppo.batch_size=32"),
            ("brax", "published"): ("env=halfcheetah", "ppo=halfcheetah", "env.backend=spring", *_PUBLISHED),
            ("brax", "mjx"): ("env=halfcheetah", "ppo=halfcheetah", "env.backend=mjx", *_BRAX, "ppo.batch_size=32"),
            ("sb3", ""): _CHEETAH,
            ("sbx", ""): _CHEETAH,
        },
    ),
    "hopper": Goal(
        1000.0,
        {
            ("ours", ""): ("env=hopper", *_OURS, "eval.num_evals=40"),
            ("brax", ""): (
                "env=hopper",
                "ppo=hopper",
                "env.backend=mjx",
                *_BRAX,
                "ppo.optimizer.eps=1e-8",
                "ppo.reward_scaling=1",
            ),
            ("sb3", ""): _HOPPER,
            ("sbx", ""): _HOPPER,
        },
    ),
    "humanoid": Goal(5000.0, {("ours", ""): ("env=humanoid", *_OURS, "eval.num_evals=100")}, limit=3600.0),
}
TASKS = tuple(dict.fromkeys((*START, *THRESHOLD)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `race` takes besides what all benchmarks take."""
    parser.add_argument("--task", action="append", choices=TASKS, help="may be repeated; all of them by default")
    parser.add_argument("--side", action="append", choices=SIDES, help="may be repeated; all of them by default")
    parser.add_argument("--measure", action="append", choices=MEASURES, help="both by default")
    parser.add_argument("--rounds", type=_rounds, default=3, help="processes per leg, 3 by default")
    parser.add_argument("--page", action="store_true", help="write the page from what was measured, and run nothing")
    parser.add_argument("--limit", type=_seconds, help="seconds per leg, in place of every task's own")
    parser.add_argument("--venvs", type=Path, default=Path(".rivals"), help="where rivals are installed")
    parser.add_argument("--results", type=Path, default=Path("docs/race.jsonl"), help="file that legs are added to")


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds, more than 0")


def start_legs(name: str, on_cpu: bool) -> Iterator[Leg]:
    """The sides of a task with the same settings, cold and warm, and the floor under them."""
    task = START[name]
    settings = (*task.settings, *(task.cut if on_cpu else ()), "eval.num_evals=0")
    settings = (*settings, f"total_steps={task.iterations * _steps(settings)}")
    for warm in (False, True):
        for backend in [name for name in task.ours if on_cpu or name != "native"] or ("",):
            chosen = settings + ((f"env.backend={backend}",) if backend else ())
            rivals = ("brax", "rsl_rl") if task.rsl_rl and not on_cpu else ("brax",)
            for side in ("ours", *(rivals if backend != "native" else ())):
                if not warm or side in WARM["start"]:
                    yield Leg("start", name, side, backend, warm, chosen, LIMIT)
            if not warm:
                yield Leg("floor", name, "floor", backend, False, chosen, LIMIT)


def _steps(settings: Sequence[str]) -> int:
    """Environment steps of an iteration."""
    from rlstable.cli.compose import compose

    return compose(list(settings)).env_steps_per_iteration


def threshold_legs(name: str) -> Iterator[Leg]:
    """Every side of a task in its own way."""
    goal = THRESHOLD[name]
    for warm in (False, True):
        for (side, case), settings in goal.sides.items():
            if warm and side not in WARM["threshold"]:
                continue
            if side == "ours":
                settings = (*settings, f"eval.target_return={goal.threshold}")
            yield Leg("threshold", name, side, case, warm, settings, goal.limit, goal.threshold)


def legs(on_cpu: bool) -> list[Leg]:
    """All there are, task by task."""
    started = [leg for name in START for leg in start_legs(name, on_cpu)]
    return started + [leg for name in THRESHOLD for leg in threshold_legs(name)]


def asked_for(every: Sequence[Leg], args: argparse.Namespace) -> list[Leg]:
    """Those that the command line names.

    Raises:
        ConfigError: There are none.
    """
    measures = [*(args.measure or MEASURES), *(["floor"] if "start" in (args.measure or MEASURES) else [])]
    chosen = [
        leg
        for leg in every
        if leg.task in (args.task or TASKS) and leg.side in (args.side or SIDES) and leg.measure in measures
    ]
    if not chosen:
        raise ConfigError("race: no leg is of that task, side and measure at once")
    return [dataclasses.replace(leg, limit=args.limit) if args.limit else leg for leg in chosen]


def in_turn(chosen: Sequence[Leg], rounds: int) -> Iterator[tuple[int, Leg]]:
    """Round by round, task by task; another leg of a task comes first in every round."""
    for number in range(1, rounds + 1):
        for group in dict.fromkeys((leg.measure == "threshold", leg.task) for leg in chosen):
            own = [leg for leg in chosen if (leg.measure == "threshold", leg.task) == group]
            shift = (number - 1) % len(own)
            yield from ((number, leg) for leg in own[shift:] + own[:shift])


def said(row: Row) -> str:
    """What a leg came to, for the console."""
    if row["measure"] == "floor":
        return f"{row['floor_sps']:,.0f} steps/s at most"
    if row["measure"] == "start":
        rate = "" if row["steady_sps"] is None else f", then {row['steady_sps']:,.0f} steps/s"
        return f"{row['ending']}; first iteration after {row['first']} s{rate}"
    return f"{row['ending']} after {row['seconds'] or row['ran']} s, {row['steps']:,} steps"


def run(args: argparse.Namespace) -> tuple[list[tuple[Leg, list[Row]]], Row]:
    """Runs what is missing, one process at a time.

    Returns:
        The results of every leg that there is on this device, and the device.

    Raises:
        ConfigError: Something cannot work.
    """
    path, rows, where = args.results, read(args.results), device()
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--results: cannot write to {path}")
    on_gpu, every = where["platform"] == "gpu", legs(where["platform"] == "cpu")
    chosen = asked_for(every, args)
    turns = [] if args.page else in_turn(chosen, args.rounds)
    missing = [(number, leg) for number, leg in turns if number not in measured(rows, leg, where["kind"])]
    for side in dict.fromkeys(leg.side for _, leg in missing if leg.side in RIVALS):
        python_of(side, args.venvs, on_gpu and side in ON_GPU)
    with contextlib.closing(Workshop(args.venvs, on_gpu)) as workshop:
        for number, leg in missing:
            about = {
                **identity(leg, where["kind"]),
                "round": number,
                "limit": leg.limit,
                "device": where,
                "commit": commit(),
            }
            row = about | workshop.run(leg, number)
            add(path, row)
            rows.append(row)
            print(f"round {number}: {leg}: {said(row)}", file=sys.stderr, flush=True)
    limited = [(leg, dataclasses.replace(leg, limit=args.limit or leg.limit)) for leg in every]
    return [(leg, list(measured(rows, own, where["kind"]).values())) for leg, own in limited], where
