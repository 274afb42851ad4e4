"""Races whole processes as a user starts them: rlstable, and the PPO of Brax, SB3, SBX and RSL-RL.

python -m scripts.bench race                                          # all legs, hours; resumes where it stopped
python -m scripts.bench race --task ant --side ours --side brax       # some tasks, some sides
python -m scripts.bench race --measure threshold --rounds 5

Every leg is a line of docs/race.jsonl when it ends. A leg with a line for this kind of device, these versions and
settings is not run again. To measure a leg again, delete its line.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import arguments, results
from scripts.process import pins, python_of
from scripts.race.legs import ON_GPU, Leg, Workshop
from scripts.results import Row

RIVALS = ("brax", "sb3", "sbx", "rsl_rl")
SIDES = ("ours", *RIVALS, "floor")
MEASURES = ("start", "threshold")
LIMIT = 1800.0
VENVS = Path(".rivals")
# Sides that are also measured with the compiled programs of an earlier process.
WARM = {"start": ("ours", "brax"), "threshold": ("ours",)}


@dataclasses.dataclass(frozen=True)
class Start:
    """The same task, hyperparameters and networks for every side."""

    settings: tuple[str, ...]  # overrides of `rlstable.train`
    cut: tuple[str, ...] = ()  # further overrides on a CPU, where a published iteration takes long
    iterations: int = 24  # number of iterations
    # our values of `env.backend`, native only on a CPU. Brax has the first. Empty: the default
    ours: tuple[str, ...] = ("mjx", "native")
    rsl_rl: bool = False  # whether RSL-RL's PPO runs, too, on Brax's backend and only on a GPU


@dataclasses.dataclass(frozen=True)
class Goal:
    """A return that each side must reach with its own settings."""

    threshold: float  # mean return of a deterministic evaluation
    # settings by side and case; a missing side does not run
    sides: Mapping[tuple[str, str], tuple[str, ...] | Mapping[str, Any]]
    limit: float = LIMIT  # seconds from the start of the process


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

# Every evaluation has ten or more episodes and takes less time than the training between two evaluations.
_OURS = ("recipe_for=cpu", "eval.num_envs=10")
_BRAX = ("total_steps=10_000_000", "eval.num_evals=100", "eval.num_envs=10", "ppo.num_envs=256")
# The published settings, with an evaluation after every iteration.
_PUBLISHED = ("total_steps=50_000_000", "eval.num_evals=200", "eval.num_envs=10")

# RL Baselines3 Zoo, hyperparams/ppo.yml, commit 00128b5d: "tuned" for HalfCheetah-v3 and Hopper-v3, and its
# defaults of SB3 with normalisation for Ant-v3.
_NETWORKS = {
    "log_std_init": -2, "ortho_init": False, "activation_fn": "relu", "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}  # fmt: skip
_EPISODES = {"episodes": 10}
_PENDULUM = _EPISODES | {
    "env": "InvertedPendulum-v5", "num_envs": 8, "normalize": False, "evaluate_every": 2,
    "ppo": {"n_steps": 256, "batch_size": 256, "n_epochs": 10, "learning_rate": 1e-3},
}  # fmt: skip
_ANT = _EPISODES | {"env": "Ant-v5", "num_envs": 1, "normalize": True, "evaluate_every": 10, "ppo": {}}
_CHEETAH = _EPISODES | {
    "env": "HalfCheetah-v5", "num_envs": 1, "normalize": True, "evaluate_every": 40,
    "ppo": {
        "batch_size": 64, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096,
        "policy_kwargs": _NETWORKS,
    },
}  # fmt: skip
_HOPPER = _EPISODES | {
    "env": "Hopper-v5", "num_envs": 1, "normalize": True, "evaluate_every": 40,
    "ppo": {
        "batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519,
        "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671,
        "policy_kwargs": _NETWORKS,
    },
}  # fmt: skip


def _walker(task: str, batch: int, zoo: Mapping[str, Any]) -> Goal:
    cut = (*_BRAX, f"ppo.batch_size={batch}")
    brax = {
        ("brax", case): (f"env={task}", f"ppo={task}", f"env.backend={backend}", *more)
        for case, backend, more in (("", "spring", cut), ("published", "spring", _PUBLISHED), ("mjx", "mjx", cut))
    }
    ours = {("ours", ""): (f"env={task}", *_OURS, "eval.num_evals=40")}
    return Goal(1500.0, {**ours, **brax, ("sb3", ""): zoo, ("sbx", ""): zoo})


THRESHOLD = {
    "inverted_pendulum": Goal(950.0, {
        ("ours", ""): ("env=inverted_pendulum",),
        ("brax", ""): (
            "env=inverted_pendulum", "env.backend=generalized", "total_steps=1_000_000", "eval.num_evals=50",
        ),
        ("brax", "published"): (
            "env=inverted_pendulum", "ppo=inverted_pendulum_brax", "env.backend=generalized", "total_steps=2_000_000",
            "eval.num_evals=19", "eval.num_envs=10",
        ),
        ("sb3", ""): _PENDULUM, ("sbx", ""): _PENDULUM,
    }, limit=600.0),
    "ant": _walker("ant", 64, _ANT),
    "halfcheetah": _walker("halfcheetah", 32, _CHEETAH),
    "hopper": Goal(1000.0, {
        ("ours", ""): ("env=hopper", *_OURS, "eval.num_evals=40"),
        ("brax", ""): (
            "env=hopper", "ppo=hopper", "env.backend=mjx", *_BRAX, "ppo.optimizer.eps=1e-8", "ppo.reward_scaling=1",
        ),
        ("sb3", ""): _HOPPER, ("sbx", ""): _HOPPER,
    }),
    "humanoid": Goal(5000.0, {("ours", ""): ("env=humanoid", *_OURS, "eval.num_evals=100")}, limit=3600.0),
}  # fmt: skip
TASKS = tuple(dict.fromkeys((*START, *THRESHOLD)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, choices in (("--task", TASKS), ("--side", SIDES), ("--measure", MEASURES)):
        arguments.add_choice(parser, name, choices)
    parser.add_argument("--rounds", type=arguments.whole(1), default=3, help="processes per leg; default: 3")
    parser.add_argument("--page", action="store_true", help="write the page from the results and run nothing")
    parser.add_argument("--results", type=Path, default=Path("docs/race.jsonl"), help="file that legs are added to")


def versions(side: str) -> dict[str, str]:
    return {"python": platform.python_version(), **pins(side)} if side in RIVALS else results.versions()


def identity(leg: Leg, kind: str) -> Row:
    """Returns the values that a leg's rows of all rounds have in common on a kind of device."""
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm", "threshold")}
    common = {**fixed, "kind": kind, "settings": leg.text, "versions": versions(leg.side)}
    return common | ({"recipe": recipe(leg)} if leg.side == "ours" else {})


def recipe(leg: Leg) -> str:
    """Returns a digest of the PPO and network settings of our leg, so that another recipe is another measurement."""
    config = compose(list(leg.settings))
    chosen = {"ppo": config.ppo.model_dump(mode="json"), "network": config.network.model_dump(mode="json")}
    return hashlib.blake2s(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()


def measured(rows: Sequence[Row], leg: Leg, kind: str) -> dict[int, Row]:
    """Returns a leg's rows by round, without rows that reached a shorter time limit than the leg's."""
    own = results.matching(rows, **identity(leg, kind))
    return {row["round"]: row for row in own if row.get("ending") != "time limit" or row["limit"] >= leg.limit}


def start_legs(name: str, on_cpu: bool) -> Iterator[Leg]:
    """Yields the sides of a task with the same settings, cold and warm, and their floor."""
    task = START[name]
    settings = (*task.settings, *(task.cut if on_cpu else ()), "eval.num_evals=0")
    settings = (*settings, f"total_steps={task.iterations * _steps(settings)}")
    for warm in (False, True):
        for backend in [name for name in task.ours if on_cpu or name != "native"] or ("",):
            chosen = (*settings, *([f"env.backend={backend}"] if backend else []))
            rivals = ("brax", "rsl_rl") if task.rsl_rl and not on_cpu else ("brax",)
            for side in ("ours", *(rivals if backend != "native" else ())):
                if not warm or side in WARM["start"]:
                    yield Leg("start", name, side, backend, warm, chosen, LIMIT)
            if not warm:
                yield Leg("floor", name, "floor", backend, False, chosen, LIMIT)


def _steps(settings: Sequence[str]) -> int:
    return compose(list(settings)).env_steps_per_iteration


def threshold_legs(name: str) -> Iterator[Leg]:
    """Yields the sides of a task, each with its own settings."""
    goal = THRESHOLD[name]
    for warm in (False, True):
        for (side, case), settings in goal.sides.items():
            if warm and side not in WARM["threshold"]:
                continue
            if side == "ours":
                settings = (*settings, f"eval.target_return={goal.threshold}")
            yield Leg("threshold", name, side, case, warm, settings, goal.limit, goal.threshold)


def legs(on_cpu: bool) -> list[Leg]:
    started = [leg for name in START for leg in start_legs(name, on_cpu)]
    return started + [leg for name in THRESHOLD for leg in threshold_legs(name)]


def asked_for(every: Sequence[Leg], args: argparse.Namespace) -> list[Leg]:
    """Returns the legs that the command line selects; raises ConfigError if there are none."""
    measures = [*(args.measure or MEASURES), *(["floor"] if "start" in (args.measure or MEASURES) else [])]
    chosen = [
        leg
        for leg in every
        if leg.task in (args.task or TASKS) and leg.side in (args.side or SIDES) and leg.measure in measures
    ]
    if not chosen:
        raise ConfigError("race: no leg has that task, side and measure")
    return chosen


def in_turn(chosen: Sequence[Leg], rounds: int) -> Iterator[tuple[int, Leg]]:
    """Yields legs round by round, task by task; every round starts with another leg of the task."""
    for number in range(1, rounds + 1):
        for group in dict.fromkeys((leg.measure == "threshold", leg.task) for leg in chosen):
            own = [leg for leg in chosen if (leg.measure == "threshold", leg.task) == group]
            shift = (number - 1) % len(own)
            yield from ((number, leg) for leg in own[shift:] + own[:shift])


def summary(row: Row) -> str:
    if row["measure"] == "floor":
        return f"{row['floor_sps']:,.0f} steps/s at most"
    if row["measure"] == "start":
        rate = "" if row["steady_sps"] is None else f", then {row['steady_sps']:,.0f} steps/s"
        return f"{row['ending']}; first iteration after {row['first']} s{rate}"
    return f"{row['ending']} after {row['seconds'] or row['ran']} s, {row['steps']:,} steps"


def run(args: argparse.Namespace) -> tuple[list[tuple[Leg, list[Row]]], Row]:
    """Runs the missing legs, one process at a time."""
    rows, device = results.read(args.results), results.device()
    results.check_writable(args.results)
    on_gpu, every, kind = device["platform"] == "gpu", legs(device["platform"] == "cpu"), device["kind"]
    chosen = asked_for(every, args)
    turns = [] if args.page else in_turn(chosen, args.rounds)
    missing = [(number, leg) for number, leg in turns if number not in measured(rows, leg, kind)]
    for side in dict.fromkeys(leg.side for _, leg in missing if leg.side in RIVALS):
        python_of(side, VENVS, on_gpu and side in ON_GPU)
    with contextlib.closing(Workshop(VENVS, on_gpu)) as workshop:
        for number, leg in missing:
            about = {"round": number, "limit": leg.limit, "device": device, "commit": results.commit()}
            row = {**identity(leg, kind), **about, **workshop.run(leg, number)}
            results.add(args.results, [row])
            rows.append(row)
            print(f"round {number}: {leg}: {summary(row)}", file=sys.stderr, flush=True)
    return [(leg, list(measured(rows, leg, kind).values())) for leg in every], device
