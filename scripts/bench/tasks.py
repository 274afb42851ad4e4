"""The tables of what is measured: tasks, and every side's settings."""

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlstable.cli.compose import compose
from scripts.bench.leg import ONE_CORE, Leg

RIVALS = ("brax", "sb3", "sbx")
SIDES = ("ours", *RIVALS)
LIMIT = 1800.0
FIRST = "inverted_pendulum"  # the task of the README's table
_CPU_RECIPE, _CPU_CUT = "recipe_for=cpu", "ppo.num_envs=256"


class Start(NamedTuple):
    """The same task, hyperparameters and networks for every side."""

    settings: tuple[str, ...]  # overrides of `rlstable.train`
    cut: tuple[str, ...] = ()  # further overrides on a CPU, where a published iteration takes long
    iterations: int = 24  # number of iterations
    # our values of `env.backend`, native only on a CPU. Brax has the first. Empty: the default
    ours: tuple[str, ...] = ("mjx", "native")


class Goal(NamedTuple):
    """A return that each side must reach with its own settings."""

    threshold: float  # mean return of a deterministic evaluation
    # settings by side and case; a missing side does not run
    sides: Mapping[tuple[str, str], tuple[str, ...] | Mapping[str, Any]]
    limit: float = LIMIT  # seconds from the start of the process


# Runs with guards=off and guards=default beside the limit, by task and case: the plain commands, tasks of Playground
# where it is installed.
GUARDS: dict[tuple[str, str], tuple[str, ...]] = {
    **{(name, ""): (f"env={name}",) for name in (FIRST, "hopper", "halfcheetah", "ant", "humanoid")},
    ("quadruped", ""): ("env=robot_velocity", "env.xml=tests/robot/models/quadruped.xml"),
    **{(name, ""): ("env=playground", f"env.name={name}") for name in ("CheetahRun", "Go1JoystickFlatTerrain")},
    **{
        (name, case): (f"env={name}", *more)
        for name, envs in (("halfcheetah", 64), ("humanoid", 64))
        for case, more in ((ONE_CORE, ()), (f"{envs} environments", (f"ppo.num_envs={envs}",)))
    },
}
# Published hyperparameters, which fill an accelerator.
GUARDS_ON_GPU: dict[tuple[str, str], tuple[str, ...]] = {
    ("ant", ""): ("env=ant", "ppo=ant", "env.backend=mjx"),
    ("humanoid", ""): ("env=humanoid", "ppo=humanoid", "env.backend=mjx"),
}
START = {
    "fast": Start(("env=fast",), iterations=48, ours=()),
    "inverted_pendulum": Start(("env=inverted_pendulum", "ppo=inverted_pendulum_brax"), ("ppo.batch_size=128",)),
    "ant": Start(("env=ant", "ppo=ant"), ("ppo.num_envs=256", "ppo.batch_size=64")),
    "humanoid": Start(
        ("env=humanoid", "ppo=humanoid"), ("ppo.num_envs=256", "ppo.batch_size=128", "ppo.num_minibatches=4")
    ),
}

# Every evaluation has ten or more episodes and takes less time than the training between two evaluations.
_OURS = (_CPU_RECIPE, "eval.num_envs=10")
_BRAX = ("total_steps=10_000_000", "eval.num_evals=100", "eval.num_envs=10", _CPU_CUT)
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


def _walker(task: str, threshold: float, batch: int, zoo: Mapping[str, Any]) -> Goal:
    cut = (*_BRAX, f"ppo.batch_size={batch}")
    brax = {
        ("brax", case): (f"env={task}", f"ppo={task}", f"env.backend={backend}", *more)
        for case, backend, more in (("", "spring", cut), ("published", "spring", _PUBLISHED), ("mjx", "mjx", cut))
    }
    ours = {("ours", ""): (f"env={task}", *_OURS, "eval.num_evals=40")}
    return Goal(threshold, {**ours, **brax, ("sb3", ""): zoo, ("sbx", ""): zoo}, limit=600.0)


# Thresholds are returns that no policy has that stands still, near the public records of scripts/tasks/tasks.yaml.
# In the order of the race: the rounds of the first tasks are the cheapest.
THRESHOLD = {
    FIRST: Goal(950.0, {
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
    "humanoid": Goal(5000.0, {("ours", ""): ("env=humanoid", *_OURS, "eval.num_evals=100")}, limit=3600.0),
    "halfcheetah": _walker("halfcheetah", 5000.0, 32, _CHEETAH),
    "hopper": Goal(2400.0, {
        ("ours", ""): ("env=hopper", *_OURS, "eval.num_evals=40"),
        ("brax", ""): (
            "env=hopper", "ppo=hopper", "env.backend=mjx", *_BRAX, "ppo.optimizer.eps=1e-8", "ppo.reward_scaling=1",
        ),
        ("sb3", ""): _HOPPER, ("sbx", ""): _HOPPER,
    }, limit=600.0),
    "ant": _walker("ant", 2000.0, 64, _ANT),
}  # fmt: skip
MEASURES: dict[str, tuple[str, ...]] = {
    "threshold": tuple(THRESHOLD), "start": tuple(START),
    "guards": tuple(dict.fromkeys(name for name, _ in GUARDS | GUARDS_ON_GPU)),
}  # fmt: skip
TASKS = tuple(dict.fromkeys(task for names in MEASURES.values() for task in names))


def legs(on_cpu: bool) -> list[list[Leg]]:
    """Returns groups of legs, most telling first. Rounds of the first group come before all others."""
    pairs = [
        Leg("guards", name, "ours", case, False, (*own, "seed=0"), LIMIT)
        for (name, case), own in (GUARDS if on_cpu else GUARDS_ON_GPU).items()
        if "env=playground" not in own or importlib.util.find_spec("mujoco_playground")
    ]
    if on_cpu:
        first, *others = [list(threshold_legs(name, on_cpu)) for name in THRESHOLD]
        return [first, *(list(start_legs(name, on_cpu)) for name in START), pairs, *others]
    starts = [list(start_legs(name, on_cpu)) for name in ("ant", "humanoid")]
    return [[], *starts, pairs, *(list(threshold_legs(name, on_cpu)) for name in ("ant", "humanoid"))]


def start_legs(name: str, on_cpu: bool) -> Iterator[Leg]:
    """Yields the sides of a task with the same settings, cold and warm."""
    task = START[name]
    settings = (*task.settings, *(task.cut if on_cpu else ()), "eval.num_evals=0")
    settings = (*settings, f"total_steps={task.iterations * _steps(settings)}")
    for warm in (False, True):
        for backend in [name for name in task.ours if on_cpu or name != "native"] or ("",):
            chosen = (*settings, *([f"env.backend={backend}"] if backend else []))
            for side in ("ours",) if backend == "native" else ("ours", "brax"):
                yield Leg("start", name, side, backend, warm, chosen, LIMIT)


@functools.cache
def _steps(settings: tuple[str, ...]) -> int:
    return compose(list(settings)).env_steps_per_iteration


def threshold_legs(name: str, on_cpu: bool) -> Iterator[Leg]:
    """Yields the sides of a task, each with its own settings; those made for a CPU only on a CPU."""
    goal = THRESHOLD[name]
    warm_sides = ("ours", "brax", "sbx") if name == FIRST else ("ours",)
    for warm in (False, True):
        for (side, case), settings in goal.sides.items():
            cpu_only = side in ("sb3", "sbx") or (side == "brax" and _CPU_CUT in settings)
            if (warm and side not in warm_sides) or (cpu_only and not on_cpu):
                continue
            if side == "ours":
                settings = (*settings, f"eval.target_return={goal.threshold}")
                settings = tuple(word for word in settings if on_cpu or word != _CPU_RECIPE)
            yield Leg("threshold", name, side, case, warm, settings, goal.limit, goal.threshold)
