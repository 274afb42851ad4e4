"""Trains with every fault: guards=off, guards=default and Brax's PPO, with several seeds.

python -m scripts.survival                       # all cases, one line per case; resumes where it stopped
python -m scripts.survival --page                # docs/survival.md from the results

All seeds of a case train in one program, by the plain command, those of Brax's PPO one by one. Policies are evaluated
on the environment without the fault.
"""

import dataclasses
import functools
import itertools
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import faulted, results, study
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.study import Cell
from scripts.survival import page as survival_page

# A third of the recipe's learning rate, at which a solved pendulum sometimes collapses without a fault.
_PENDULUM = ("ppo=inverted_pendulum", "ppo.learning_rate=3e-4", "eval.num_envs=32")
# A second task that trains in seconds, also with 100 iterations, so that faults begin in the same iteration.
_POINT_MASS = (
    "ppo=fast", "network=small", "env.episode_length=50", "ppo.learning_rate=1e-3", "ppo.normalize_advantage=true",
    "eval.num_envs=32",
)  # fmt: skip
SOLVED = 60  # iterations, of 100, after which the seeds 0 to 4 have solved the pendulum
LATE = 320  # steps of an environment of the pendulum in 10 iterations


@dataclasses.dataclass(frozen=True)
class Task:
    env: tuple[str, ...]
    settings: tuple[str, ...]
    steps: int
    late: str  # its class with an element of the observation that begins to vary


_LATE_PENDULUM, _POINT = "scripts.survival.environments:LatePendulum", "scripts.stability.tasks:"
TASKS = {
    **{
        backend: Task(("env=inverted_pendulum",), (*_PENDULUM, f"env.backend={backend}"), 204_800, _LATE_PENDULUM)
        for backend in ("generalized", "mjx")
    },
    "point_mass": Task(("env=import", f"env.name={_POINT}PointMass"), _POINT_MASS, 256_000, f"{_POINT}LatePointMass"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str  # its name in the table
    fault: Mapping[str, Any]  # keys of the `fault` section; empty for a fault outside that section
    overrides: tuple[str, ...] = ()  # further overrides of the training
    unstable: tuple[str, float] | None = None  # dotted name of a part of the model, and its factor in some episodes
    late: bool = False  # whether an element of the observation begins to vary after 10 iterations
    supervised: bool = False  # whether the supervisor is needed
    rival: bool = False  # whether Brax's PPO can have the fault
    seeds: int = 3  # number of trainings without `--seeds`


def _cases() -> Iterator[Case]:
    later = {"start": 10}
    yield Case("clean", {}, rival=True)
    wild, nan = ("nan", "inf", 1e30), ("nan",)
    sites = {"physics": wild, "warm_start": nan, "observation": wild, "reward": wild[:2], "done": nan, "metrics": nan}
    for site, values in {**sites, "info": nan, "reset": nan}.items():
        for value in values:
            yield Case(f"{site} {value}", {"site": site, "value": value, **later}, rival=True)
    yield Case("all at once", {"site": "physics", "probability": 1.0, "iterations": 1, **later}, rival=True)
    yield Case("storm of 5 iterations", {"site": "physics", "probability": 0.9, "iterations": 5, **later})
    yield Case("reward -65,882", {"site": "reward", "value": -65882.0, "iterations": 1, **later}, rival=True)
    yield Case("action nan", {"site": "action", **later})
    yield Case("policy std nan", {"site": "policy_std", **later})
    yield Case("policy std negative", {"site": "policy_std", "value": -0.1, **later})
    yield Case("log-ratio overflow", {"site": "log_ratio", **later})
    for value in ("nan", "inf", 1e20):
        yield Case(f"gradient {value}", {"site": "gradient", "value": value, **later})
    yield Case("loss overflow", {"site": "loss", **later})
    yield Case("value loss 1e10 times", {"site": "value_loss", **later})
    yield Case("kl nan", {"site": "kl", **later})
    yield Case("adam in float16", {"site": "adam", **later})
    yield Case("learning rate x1000", {"site": "learning_rate", **later})
    # Finite collapses of a solved task need a rollback by the supervisor.
    once = {"start": SOLVED, "iterations": 1}
    for name, fault in {
        f"learning rate x100 at iteration {SOLVED}": {"site": "learning_rate", "value": 100.0},
        f"critic scrambled at iteration {SOLVED}": {"site": "critic"},
        f"normaliser moved at iteration {SOLVED}": {"site": "normalizer"},
    }.items():
        yield Case(name, {**fault, **once}, supervised=True, seeds=5)
    tiny = ("ppo.batch_size=1", "ppo.num_minibatches=64")
    yield Case("batch of 1 unroll, rate x1000", {"site": "learning_rate", **later}, tiny)
    yield Case("counters at 2^31", {"site": "counters", "value": 2.0**31})
    yield Case("counters at 2^32", {"site": "counters", "value": 2.0**32})
    yield Case("disk full", {"site": "disk", "start": 10, "iterations": 40}, supervised=True)
    yield Case("service down", {"site": "sinks", **later}, supervised=True)
    yield Case("float16 networks", {}, ("precision=float16", "ppo.optimizer.eps=1e-5"))
    yield Case("timestep x1000, 1 episode in 20", {}, unstable=("opt.timestep", 1000.0))
    yield Case("an element begins to vary", {}, late=True)
    yield Case("actuator gain x1e7, 1 episode in 20", {}, unstable=("actuator.gain", 1e7))


CASES = {case.name: case for case in _cases()}


def environment(task: str, case: Case) -> tuple[str, ...]:
    """The overrides of the environment of a training; its evaluations have a sound one."""
    if case.unstable is not None:
        part, factor = case.unstable
        own, arguments = "scripts.survival.environments:UnstablePendulum", f"part: {part}, factor: {factor}"
        sound = "factor: 1.0"
    elif case.late:
        own, arguments, sound = TASKS[task].late, f"begins: {LATE}", "begins: 0"
    else:
        return TASKS[task].env
    return ("env=import", f"env.name={own}", f"env.kwargs={{{arguments}}}", f"eval.env_kwargs={{{sound}}}")


def settings_of(task: str, case: Case) -> list[str]:
    host = ("checkpoint=frequent",) if case.supervised else ("checkpoint=off", "supervise=off")
    begins = int(case.fault["value"]) if case.fault.get("site") == "counters" else 0  # the count of its first step
    steps = f"total_steps={begins + TASKS[task].steps}"
    return [*environment(task, case), *TASKS[task].settings, steps, "eval.num_evals=1", *host, *case.overrides]


def train(task: str, side: str, case: Case, seeds: range) -> Iterator[Row]:
    for row in faulted.train(settings_of(task, case), side, case.fault, seeds):
        finished = row["ending"] == "completed"
        # A run that its guards have ended is not evaluated, and its state is finite.
        finite = row["return"] is not None or (side != "brax" and not finished)
        yield {**row, "finished": finished, "finite": finite}


def cells(asked: Namespace) -> Iterator[Cell]:
    for task, side in itertools.product(asked.task or TASKS, asked.side or faulted.SIDES):
        for case in (CASES[name] for name in asked.only or CASES):
            if possible(task, side, case.name):
                about = {"task": task, "side": side, "case": case.name}
                own = functools.partial(train, task, side, case)
                yield Cell(" ".join(about.values()), about, range(asked.seeds or case.seeds), own)


def possible(task: str, side: str, case: str) -> bool:
    """Only MuJoCo has a warm start. The point mass has no model to change, and Brax's PPO is not run on it."""
    about = CASES[case]
    if task == "point_mass" and (about.unstable is not None or side == "brax"):
        return False
    has_site = task == "mjx" or about.fault.get("site") != "warm_start"
    return has_site and (side != "brax" or about.rival)


def main(argv: Sequence[str] | None = None) -> None:
    choices = {"task": TASKS, "side": faulted.SIDES, "only": CASES}
    parser = results.study_parser(__doc__, Path("docs/survival.jsonl"), **choices)
    parser.add_argument("--seeds", type=int, help="number of seeds; default: 3, and 5 for collapses")
    asked = parser.parse_args(argv)
    brax_rival.keep_compiled_programs()
    study.run(asked, cells(asked), lambda rows, out: survival_page.write(rows, [*CASES], out, possible))


if __name__ == "__main__":
    main()
