"""Trains with every fault: guards=off, guards=default and Brax's PPO, with several seeds.

python -m scripts.survival                       # all cases, one line per case; resumes where it stopped
python -m scripts.survival --page                # docs/survival.md and its picture from the results

Policies are evaluated on the environment without the fault. Faults of the iteration are data of the program, so that
one compiled program per task and side trains all of them, with all seeds at once.
"""

import dataclasses
import functools
import itertools
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlstable import faults
from rlstable.cli.compose import compose
from rlstable.config import Config
from rlstable.config.faults import FaultConfig
from rlstable.device import sharding
from rlstable.device.mesh import make_mesh
from rlstable.envs.episodes import run_episodes
from rlstable.envs.load import load_env
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.guards.env import Quarantine
from rlstable.policy.policy import choose_action
from rlstable.ppo.guards import env_guards
from rlstable.ppo.initial import init_state
from rlstable.ppo.state import SPECS
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.setup import make_ppo
from scripts import results, study
from scripts.results import Row
from scripts.rivals import brax_rival
from scripts.stability.tasks import Late
from scripts.study import Cell
from scripts.survival import page as survival_page

# A third of the recipe's learning rate, at which a solved pendulum sometimes collapses without a fault.
STEADY = ("env=inverted_pendulum", "env.backend=generalized", "ppo.learning_rate=3e-4", "total_steps=204800")
# A second task that trains in seconds, also with 100 iterations, so that faults begin in the same iteration.
POINT_MASS = (
    "env=import", "env.name=scripts.stability.tasks:PointMass", "ppo=fast", "network=small", "env.episode_length=50",
    "ppo.learning_rate=1e-3", "ppo.normalize_advantage=true", "total_steps=256000", "eval.num_envs=32",
)  # fmt: skip
TASKS = {"generalized": STEADY, "mjx": (*STEADY, "env.backend=mjx"), "point_mass": POINT_MASS}
EPISODES = 32
SOLVED = 60  # iterations, of 100, after which the seeds 0 to 4 have solved the pendulum
POOL = 64
NO_INCIDENTS = ("supervise.incident.enabled=false",)  # the seeds are vmapped, and incidents have one slot for all
HEALTHY = {"site": "physics", "probability": 0.0}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str  # its name in the table
    fault: Mapping[str, Any]  # keys of the `fault` section; `HEALTHY` for a fault outside that section
    overrides: tuple[str, ...] = ()  # further overrides of the training
    unstable: tuple[str, float] | None = None  # dotted name of a part of the model, and its factor in some episodes
    late: bool = False  # whether an element of the observation begins to vary after 10 iterations
    whole_run: bool = False  # whether the fault is outside the iteration, so that the case needs a `TrainingLoop`
    rival: bool = False  # whether Brax's PPO can have the fault
    seeds: int = 3  # number of trainings without `--seeds`


def _cases() -> Iterator[Case]:
    later = {"start": 10}
    yield Case("clean", HEALTHY, rival=True)
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
    # Finite collapses of a solved task need a rollback by the supervisor, which only a whole run has.
    once = {"start": SOLVED, "iterations": 1}
    for name, fault in {
        f"learning rate x100 at iteration {SOLVED}": {"site": "learning_rate", "value": 100.0},
        f"critic scrambled at iteration {SOLVED}": {"site": "critic"},
        f"normaliser moved at iteration {SOLVED}": {"site": "normalizer"},
    }.items():
        yield Case(name, {**fault, **once}, whole_run=True, seeds=5)
    tiny = ("ppo.batch_size=1", "ppo.num_minibatches=64")
    yield Case("batch of 1 unroll, rate x1000", {"site": "learning_rate", **later}, tiny)
    yield Case("counters at 2^31", {"site": "counters", "value": 2.0**31})
    yield Case("counters at 2^32", {"site": "counters", "value": 2.0**32})
    yield Case("disk full", {"site": "disk", "start": 10, "iterations": 40}, whole_run=True)
    yield Case("service down", {"site": "sinks", **later}, whole_run=True)
    yield Case("float16 networks", HEALTHY, ("precision=float16", "ppo.optimizer.eps=1e-5"))
    yield Case("timestep x1000, 1 episode in 20", HEALTHY, unstable=("opt.timestep", 1000.0))
    yield Case("an element begins to vary", HEALTHY, late=True)
    yield Case("actuator gain x1e7, 1 episode in 20", HEALTHY, unstable=("actuator.gain", 1e7))


CASES = {case.name: case for case in _cases()}


class Unstable:
    """A Brax environment that multiplies a part of its model in some episodes, so that no integrator is stable."""

    def __init__(self, env: Any, name: str, factor: float):
        self._env, self._name, self._factor = env, name, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, rng: jax.Array) -> Any:
        state = self._env.reset(rng)
        wild = jax.random.bernoulli(jax.random.fold_in(rng, 1), 0.05)
        return state.replace(info={**state.info, "wild": wild.astype(np.float32)})

    def step(self, state: Any, action: jax.Array) -> Any:
        stable, wild = self._env.unwrapped.sys, state.info["wild"]
        changed = functools.reduce(getattr, self._name.split("."), stable) * (1.0 + wild * (self._factor - 1.0))
        self._env.unwrapped.sys = stable.tree_replace({self._name: changed})
        try:
            return self._env.step(state, action)
        finally:
            self._env.unwrapped.sys = stable


class Arena:
    """A compiled training program for several seeds at once."""

    def __init__(self, config: Config, seeds: Sequence[int], unstable: tuple[str, float] | None, late: bool):
        env = load_env(config.env)
        trained = env if unstable is None else Unstable(load_env(config.env), *unstable)
        if late:
            begins = 10 * config.env_steps_per_iteration // config.ppo.num_envs
            env, trained = Late(env, 0), Late(trained, begins)
        lengths = (config.env.episode_length, config.env.action_repeat)
        self._envs = VectorEnv(trained, *lengths, env_guards(config.guards))
        self._eval_env = VectorEnv(env, *lengths, {"quarantine": Quarantine()})
        self._config, self._seeds = config, seeds
        ppo = make_ppo(config, self._envs_with(HEALTHY), env.action_size)
        self._ppo = faults.arm(ppo, config.precision.matmul, FaultConfig(**HEALTHY))
        self._mesh = make_mesh(1)
        self._healthy = self._first_states(HEALTHY)
        placed = sharding.place(self._healthy, self._mesh, SPECS)
        program = sharding.over_devices(
            jax.vmap(self._ppo.iteration), self._mesh, (SPECS,), (SPECS, sharding.REPLICATED), donate=(0,)
        )
        self._program = program.lower(placed).compile()
        self._evaluate = jax.jit(jax.vmap(self._episodes, in_axes=(0, 0, None)))

    def run(self, fault: Mapping[str, Any]) -> list[Row]:
        """Trains every seed with the fault, then evaluates the policies without the fault."""
        started = time.perf_counter()
        config = FaultConfig(**fault)
        # Faults of resets and counters change the first state; all other faults are data of the program.
        states = self._first_states(fault) if config.site in ("reset", "counters") else self._healthy
        data = jax.tree.map(lambda x: np.stack([np.asarray(x)] * len(self._seeds)), faults.as_data(config))
        state = sharding.place(dataclasses.replace(states, fault=data), self._mesh, SPECS)
        for _ in range(self._config.total_steps // self._config.env_steps_per_iteration):
            state, _ = self._program(state)
            if not self._any_alive(state):
                break  # further training changes nothing
        return self._rows(state, (time.perf_counter() - started) / len(self._seeds))

    def _any_alive(self, state: Any) -> bool:
        params = jax.device_get(sharding.first_device(state.params))
        seeds = (jax.tree.map(lambda x, i=index: x[i], params) for index in range(len(self._seeds)))
        return any(map(brax_rival.all_finite, seeds))

    def _rows(self, state: Any, seconds: float) -> list[Row]:
        learned = sharding.first_device((state.params, state.normalizer))
        episodes = jax.device_get(self._evaluate(*learned, jax.random.PRNGKey(0)))
        counted = jax.device_get(state.counters.trips)
        rows = []
        for index, seed in enumerate(self._seeds):
            whole = (learned, state.opt_state, counted, episodes)
            *mine, trips, played = jax.tree.map(lambda x, i=index: np.asarray(x)[i], whole)
            trips = {name: _total(counter) for name, counter in trips.items()}
            value = brax_rival.mean_return(played)
            rows.append(_row(seed, True, brax_rival.all_finite(mine), value, trips, seconds))
        return rows

    def _envs_with(self, fault: Mapping[str, Any]) -> VectorEnv:
        return faults.faulty_env(self._envs, FaultConfig(**fault))

    def _first_states(self, fault: Mapping[str, Any]) -> Any:
        resets = Resets(self._envs_with(fault), self._config.ppo.num_envs)
        states = []
        for seed in self._seeds:
            key_envs, key_pool, key = jax.random.split(jax.random.PRNGKey(seed), 3)
            env_state = resets.draw(key_envs, self._config.ppo.num_envs)
            pool = resets.pool(key_pool, POOL) if self._envs.uses_pool else None
            state = init_state(self._ppo, key, env_state, pool)
            states.append(jax.device_get(faults.armed_state(state, FaultConfig(**fault))))
        return jax.tree.map(lambda *x: np.stack(x), *states)

    def _episodes(self, params: Any, statistics: Any, key: jax.Array) -> Any:
        networks, matmul = self._ppo.networks, self._config.precision.matmul
        key, key_resets = jax.random.split(key)

        def policy(obs: Any, key: jax.Array) -> jax.Array:
            return choose_action(networks, matmul, params, statistics, networks.select(obs), key, True)[0]

        return run_episodes(self._eval_env, policy, jax.random.split(key_resets, EPISODES), key)


def _total(counter: Any) -> int:
    return sum((int(high) << 32) + int(low) for high, low in zip(counter.hi, counter.lo, strict=True))


def _row(seed: int, finished: bool, finite: bool, value: float | None, trips: Row, seconds: float) -> Row:
    return {
        "seed": seed, "finished": finished, "finite": finite, "return": value,
        "trips": {name: count for name, count in trips.items() if count}, "seconds": round(seconds, 1),
    }  # fmt: skip


def run_whole(overrides: Sequence[str], fault: Mapping[str, Any], seed: int) -> Row:
    faults_given = [f"fault.{key}={value}" for key, value in fault.items()]
    quiet = ["eval.target_return=null", "eval.num_evals=1", "checkpoint=frequent", "logging=quiet", "devices=1"]
    with tempfile.TemporaryDirectory() as folder:
        loop = TrainingLoop(compose([*overrides, *faults_given, f"seed={seed}", *quiet]), folder)
        result, run = loop.run(), loop.single
    state = jax.device_get((run.state.params, run.state.opt_state, run.state.normalizer))
    trips = {**results.trips(result.history[-1]), "rollback": run.host.attempts.count}
    finished = result.stop_reason.name == "completed"
    # The return of the last policy. A run that stops early has no evaluation.
    value = run.host.last_return if "eval/episode_reward" in result.metrics else None
    return _row(seed, finished, brax_rival.all_finite(state), value, trips, run.host.elapsed)


def run_rival(overrides: Sequence[str], case: Case, seeds: range) -> Iterator[Row]:
    for end in brax_rival.train(overrides, seeds, fault=FaultConfig(**case.fault)):
        finished = end["stop_reason"] == "completed"
        yield _row(end["seed"], finished, end["finite"], end["return"], {}, end["seconds"])


@functools.lru_cache(maxsize=2)
def _arena(overrides: Sequence[str], seeds: range, unstable: tuple[str, float] | None, late: bool) -> Arena:
    return Arena(compose([*overrides, "devices=1", *NO_INCIDENTS]), seeds, unstable, late)


def train(task: str, side: str, case: Case, seeds: range) -> Iterable[Row]:
    """Trains all seeds in one program, those of Brax's PPO and of whole runs one by one."""
    if side == "brax":
        return run_rival((*TASKS[task], *case.overrides), case, seeds)
    overrides = (*TASKS[task], f"guards={side}", *case.overrides)
    if case.whole_run:
        return (run_whole(overrides, case.fault, seed) for seed in seeds)
    return _arena(overrides, seeds, case.unstable, case.late).run(case.fault)


def cells(asked: Namespace) -> Iterator[Cell]:
    for task, side in itertools.product(asked.task or TASKS, asked.side or survival_page.SIDES):
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
    has_site = task == "mjx" or about.fault["site"] != "warm_start"
    return has_site and (side != "brax" or about.rival)


def main(argv: Sequence[str] | None = None) -> None:
    choices = {"task": TASKS, "side": survival_page.SIDES, "only": CASES}
    usual = "3, and 5 for collapses"
    asked = results.study_parser(__doc__, Path("docs/survival.jsonl"), usual, **choices).parse_args(argv)
    brax_rival.keep_compiled_programs()
    study.run(asked, cells(asked), lambda rows, out: survival_page.write(rows, [*CASES], out, possible))


if __name__ == "__main__":
    main()
