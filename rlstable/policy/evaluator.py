"""Evaluates policies: plays one episode per evaluation environment; aborted episodes do not count in means."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.stages import Compiled

from rlstable import faults
from rlstable.compilation import background
from rlstable.compilation.compiler import Compiler
from rlstable.compilation.ffi import interruptible
from rlstable.compilation.trace_cache import compiler_of
from rlstable.compilation.xla import Compiling
from rlstable.config import Config, ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.config.schema import validate
from rlstable.device import sharding
from rlstable.device.mesh import make_mesh
from rlstable.device.precision import level
from rlstable.device.transforms import vmap_seeds
from rlstable.device.trees import Env, Observation, Params, PyTree
from rlstable.envs.episodes import Episodes, run_episodes
from rlstable.envs.float64 import Float64Physics
from rlstable.envs.interface import check
from rlstable.envs.load import load_env
from rlstable.envs.recurrent import with_memory
from rlstable.envs.vector import VectorEnv
from rlstable.policy.policy import choose_action
from rlstable.ppo.guards import env_guards
from rlstable.ppo.networks import Networks, joined
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import TrainState
from rlstable.supervise import memory
from rlstable.supervise.memory import OutOfMemory, is_out_of_memory

Play = Callable[..., PyTree]
Act = Callable[[Observation, jax.Array], jax.Array]  # from observations and a random key to actions `[B, A]`
EvaluationMetrics = dict[str, float | None]


class PolicySnapshot(NamedTuple):
    """A policy to evaluate, with the random key of its episodes."""

    params: Params
    statistics: Statistics
    key: jax.Array


class Evaluator:
    """Plays evaluation episodes with one or more policies, always equally many, in several passes if memory is short.

    `play` is traced; it plays one episode per key, from (params, statistics, keys, key) to `Episodes`. `count` is per
    policy. `report(kind, **fields)` gets every event. `limit` are bytes that the program may use; None to wait until
    the device refuses memory.
    """

    def __init__(
        self,
        play: Play,
        count: int,
        compiler: Compiler,
        compiling: Compiling,
        report: Callable[..., None],
        limit: int | None,
    ):
        def play_pass(policies: tuple[PolicySnapshot, ...], numbers: jax.Array) -> tuple[Episodes, ...]:
            def play_one(policy: PolicySnapshot) -> Episodes:
                # One key per episode, so the number of passes does not change the first states.
                keys = jax.random.split(jax.random.split(policy.key)[1], count)
                return play(policy.params, policy.statistics, keys[numbers], policy.key)

            return vmap_seeds(play_one)(policies)

        self._play = jax.jit(play_pass)
        self._compiler, self._precision = compiler, compiler.precision
        self._compiling, self._report, self._limit = compiling, report, limit
        self._count, self._passes = count, 1
        self._building: Future[Compiled] | None = None
        self._compiled: Any = None

    def begin(self, policies: Sequence[PolicySnapshot]) -> None:
        """Starts to compile the program of `evaluate` in another thread, if possible; `prepare` waits for it."""
        if background.available() and self._compiled is None and self._building is None:
            self._building = self._begin(policies)

    def prepare(self, policies: Sequence[PolicySnapshot]) -> None:
        """Compiles the program of `evaluate`, for policies with these shapes; raises `OutOfMemory` as `evaluate`."""
        while self._compiled is None:
            building, self._building = self._building, None
            finished = building is not None and building.done()
            with contextlib.nullcontext() if finished else self._compiling("evaluation"):
                try:
                    program = (building or self._begin(policies)).result()
                except jax.errors.JaxRuntimeError as error:
                    self._double_passes(error)
                    continue
            footprint = memory.footprint(program)
            share = 0.0 if footprint is None or self._limit is None else footprint.peak / self._limit
            if share > memory.FULL and self._passes < self._count:
                self._divide(math.ceil(share))
            else:
                self._compiled = program

    def evaluate(self, policies: Sequence[PolicySnapshot]) -> list[EvaluationMetrics]:
        """Metrics `eval/...` per policy. Means cover the episodes that count, and are None if no episode counts.

        Raises `OutOfMemory` if the device has not enough memory for one episode.
        """
        started = time.perf_counter()
        played = self.play(policies)
        elapsed = (time.perf_counter() - started) / len(policies)
        return [
            {**summarize(episodes), "eval/epoch_eval_time": elapsed, "eval/sps": float(episodes.length.sum()) / elapsed}
            for episodes in played
        ]

    def play(self, policies: Sequence[PolicySnapshot]) -> list[Episodes]:
        while True:
            self.prepare(policies)
            try:
                return self._episodes(tuple(policies))
            except jax.errors.JaxRuntimeError as error:
                self._double_passes(error)

    def _episodes(self, policies: tuple[PolicySnapshot, ...]) -> list[Episodes]:
        with self._precision.compiled(), interruptible():
            passes = [jax.device_get(self._compiled(policies, numbers)) for numbers in self._episode_numbers()]
        return list(jax.tree.map(lambda *part: np.concatenate(part)[: self._count], *passes))

    def _begin(self, policies: Sequence[PolicySnapshot]) -> Future[Compiled]:
        numbers = self._episode_numbers()[0]
        name = f"evaluation {len(policies)} {len(numbers)}"
        return self._compiler.build(name, self._play, lambda: (tuple(policies), numbers))

    def _episode_numbers(self) -> np.ndarray:
        """The episode numbers of each pass, int32 `[passes, B]`; some repeat if episodes do not divide evenly."""
        per_pass = -(-self._count // self._passes)
        numbers = np.arange(self._passes * per_pass, dtype=np.int32) % self._count
        return numbers.reshape(self._passes, per_pass)

    def _double_passes(self, error: Exception) -> None:
        """Doubles the number of passes if the device refused memory; raises any other error."""
        if not is_out_of_memory(error):
            raise error
        if self._passes >= self._count:
            said = "The device refused memory for one evaluation episode; free device memory, or set eval.num_evals=0."
            raise OutOfMemory(said) from error
        self._divide(2)

    def _divide(self, factor: int) -> None:
        self._passes, self._compiled = min(max(factor, 2) * self._passes, self._count), None
        self._report("evaluation_divided", passes=self._passes)


def snapshot_of(state: TrainState, key: jax.Array) -> PolicySnapshot:
    params, statistics = sharding.first_device((state.params, state.normalizer))
    return without_critic(params, statistics, key)


def without_critic(params: Params, statistics: Statistics, key: jax.Array) -> PolicySnapshot:
    """The parts with which a policy acts, so that an evaluation of a saved policy has the same program."""
    return PolicySnapshot({"policy": params["policy"]}, dataclasses.replace(statistics, value=None), key)


def valid_episodes(episodes: Episodes) -> np.ndarray:
    """Whether an episode counts, bool `[B]`: it was not aborted and its return is finite."""
    return np.asarray((episodes.aborted == 0) & np.isfinite(episodes.metrics["reward"]))


def returns_of(episodes: Episodes) -> np.ndarray:
    """Returns of the episodes, `[B]`, NaN where an episode does not count."""
    return np.where(valid_episodes(episodes), np.asarray(episodes.metrics["reward"], np.float64), np.nan)


def summarize(episodes: Episodes) -> EvaluationMetrics:
    """Mean and standard deviation of every metric over the episodes that count."""
    valid = valid_episodes(episodes)
    metrics: EvaluationMetrics = {}
    # The return last, so that a metric of the environment called reward_std does not replace its deviation.
    named = sorted(episodes.metrics.items(), key=lambda item: item[0] == "reward")
    names = [(f"eval/episode_{name}", f"eval/episode_{name}_std", values) for name, values in named]
    for mean, deviation, values in (*names, ("eval/avg_episode_length", "eval/std_episode_length", episodes.length)):
        metrics[mean] = float(values[valid].mean()) if valid.any() else None
        metrics[deviation] = float(values[valid].std()) if valid.any() else None
    return metrics | {"eval/aborted_share": float(1.0 - valid.mean())}


def make_evaluator(
    config: Config, networks: Networks, compiling: Compiling, report: Callable[..., None], single: Env | None = None
) -> Evaluator:
    """The evaluator of a configuration; a `ConfigError` if `eval.env_kwargs` does not fit the environment.

    `single` is the environment, if the caller has loaded it. The other arguments are those of `Evaluator`.
    """
    env, precision = evaluation_env(config, single), level(config.precision)
    policy = acting(networks, precision.matmul, config.eval.deterministic)

    def play(params: Params, statistics: Statistics, keys: jax.Array, key: jax.Array) -> Episodes:
        with precision.narrow():
            return run_episodes(env, policy(params, statistics), keys, jax.random.split(key)[0])

    compiler = compiler_of(config, make_mesh(1), env.env)
    own = config.supervise.memory
    limit = memory.limit(jax.local_devices()[0], own.limit_gib) if own.adapt else None
    return Evaluator(play, config.eval.num_envs, compiler, compiling, report, limit)


def evaluation_env(config: Config, single: Env | None = None) -> VectorEnv:
    """The evaluation environments. They have env guards even with `guards` off, because a NaN return has no meaning."""
    if single is None:
        single = load_env(config.env, config.eval.env_kwargs, randomize=config.eval.randomize)
    if config.env.source == "import" and config.eval.env_kwargs:  # without kwargs it was checked for training
        check(single, f"{config.env.name} with eval.env_kwargs", config.network)
    env = VectorEnv(
        with_memory(Float64Physics(single) if level(config.precision).x64 else single, config.network),
        config.env.episode_length,
        config.env.action_repeat,
        env_guards(config.guards) or env_guards(validate(GuardsConfig, {})),
    )
    return faults.faulty_env(env, config.fault) if config.fault.eval else env


def require_same_observation(trained: Env, played: Env) -> None:
    """Raises ConfigError if `eval.env_kwargs` change the observation, which the policy could not read."""
    shapes = [
        jax.tree.map(lambda x: x.shape, jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
        for env in (trained, played)
    ]
    if shapes[0] != shapes[1]:
        raise ConfigError(
            f"eval.env_kwargs: observations of training have the shape {shapes[0]}, and those of evaluations "
            f"{shapes[1]}; leave out the arguments that change it"
        )


def acting(networks: Networks, matmul: str, deterministic: bool) -> Callable[[Params, Statistics], Act]:
    """A function from parameters and statistics to a policy, which has no guard.

    The actions of a recurrent policy are those for its own environment (`envs.recurrent`).
    """

    def policy(params: Params, statistics: Statistics) -> Act:
        def act(obs: Observation, key: jax.Array) -> jax.Array:
            selected, memory = networks.select(obs), networks.memory(obs)
            chosen = choose_action(networks, matmul, params, statistics, selected, key, deterministic, memory)
            return joined(chosen.action, chosen.memory)

        return act

    return policy
