"""Evaluates policies: one episode per evaluation environment, aborted episodes left out and reported."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstable import faults
from rlstable.compilation import background
from rlstable.compilation.ffi import interruptible
from rlstable.compilation.programs import Programs
from rlstable.compilation.trace_cache import programs_of
from rlstable.compilation.xla import Compiling
from rlstable.config import Config
from rlstable.config.guards import GuardsConfig
from rlstable.config.schema import validate
from rlstable.device import sharding
from rlstable.device.precision import Precision, level
from rlstable.device.transforms import vmap_seeds
from rlstable.envs.float64 import DoublePhysics
from rlstable.envs.interface import check
from rlstable.envs.load import load_env
from rlstable.envs.vector import Episodes, VectorEnv, run_episodes
from rlstable.guards.env import env_guards
from rlstable.policy.policy import choose_action
from rlstable.ppo.networks import Networks
from rlstable.ppo.state import TrainState
from rlstable.supervise.memory_plan import OutOfMemory, is_out_of_memory

Play = Callable[[Any, Any, jax.Array, jax.Array], Episodes]
EvaluationMetrics = dict[str, float | None]


class PolicySnapshot(NamedTuple):
    """A policy to be evaluated.

    Attributes:
        params: Of the networks.
        statistics: Of the normaliser.
        key: Random key of its episodes.
    """

    params: Any
    statistics: Any
    key: jax.Array


class Evaluator:
    """Plays evaluation episodes with the current policy; in several passes where the device refuses memory for one.

    Policies are evaluated one at a time or several together, always as many as the first time.

    Args:
        play: One episode for each of some keys, (params, statistics, keys, key) to `Episodes`; jax can trace it.
        count: Episodes of an evaluation.
        precision: What it is compiled in.
        compiling: Context manager that tells the user what is compiling.
        report: Called as `report(kind, **fields)` with every event.
        programs: What builds it; None for the usual way.
    """

    def __init__(
        self,
        play: Play,
        count: int,
        precision: Precision,
        compiling: Compiling,
        report: Callable[..., None],
        programs: Programs | None = None,
    ):
        def numbered(policies: tuple[PolicySnapshot, ...], numbers: jax.Array) -> tuple[Episodes, ...]:
            def play_one(own: PolicySnapshot) -> Episodes:
                # A key for every episode, which starts alike however many passes there are.
                keys = jax.random.split(jax.random.split(own.key)[1], count)
                return play(own.params, own.statistics, keys[numbers], own.key)

            return vmap_seeds(play_one)(policies)

        self._play = jax.jit(numbered)
        self._programs = programs or Programs(precision)
        self._count = count
        self._precision = precision
        self._compiling = compiling
        self._report = report
        self._passes = 1
        self._begun: Future[Any] | None = None
        self._compiled: Any = None

    def begin(self, policies: Sequence[PolicySnapshot]) -> None:
        """Has what `judge` will need compiled by another thread, where that is possible; `prepare` waits for it.

        Args:
            policies: Policies of the same shapes.
        """
        if background.possible() and self._compiled is None and self._begun is None:
            self._begun = self._begin(policies)

    def prepare(self, policies: Sequence[PolicySnapshot]) -> None:
        """Compiles what `judge` will need.

        Args:
            policies: Policies of the same shapes.

        Raises:
            OutOfMemory: There is not enough for a single episode.
        """
        while self._compiled is None:
            begun, self._begun = self._begun, None
            there = begun is not None and begun.done()
            with contextlib.nullcontext() if there else self._compiling("evaluation"):
                try:
                    self._compiled = (begun or self._begin(policies)).result()
                except jax.errors.JaxRuntimeError as error:
                    self._divide(error)

    def evaluate(self, policies: Sequence[PolicySnapshot]) -> list[EvaluationMetrics]:
        """Evaluates policies.

        Args:
            policies: The policies, each with the random key of its episodes.

        Returns:
            For each of them metrics under `eval/`; means are over episodes that were not aborted, None when none is
            left.

        Raises:
            OutOfMemory: There is not enough for a single episode.
        """
        started = time.perf_counter()
        played = self.play(policies)
        elapsed = (time.perf_counter() - started) / len(policies)
        return [
            {
                **summarize(episodes),
                "eval/epoch_eval_time": elapsed,
                "eval/sps": float(episodes.length.sum()) / elapsed,
            }
            for episodes in played
        ]

    def play(self, policies: Sequence[PolicySnapshot]) -> list[Episodes]:
        """Every episode by itself, as arrays of the host; arguments and errors as for `judge`."""
        while True:
            self.prepare(policies)
            try:
                return self._episodes(tuple(policies))
            except jax.errors.JaxRuntimeError as error:
                self._divide(error)

    def _episodes(self, policies: tuple[PolicySnapshot, ...]) -> list[Episodes]:
        with self._precision.compiled(), interruptible():
            passes = [jax.device_get(self._compiled(policies, own)) for own in self._numbers()]
        return [
            jax.tree.map(lambda *part: np.concatenate(part)[: self._count], *parts)
            for parts in zip(*passes, strict=True)
        ]

    def _begin(self, policies: Sequence[PolicySnapshot]) -> Future[Any]:
        """Starts compiling in another thread."""
        own, numbers = tuple(policies), self._numbers()[0]
        return self._programs.build(f"evaluation {len(own)} {len(numbers)}", self._play, lambda: (own, numbers))

    def _numbers(self) -> np.ndarray:
        """Which episodes are played in which pass, int32 `[passes, B]`; some twice where they do not divide."""
        share = -(-self._count // self._passes)
        numbers = np.arange(self._passes * share, dtype=np.int32) % self._count
        return numbers.reshape(self._passes, share)

    def _divide(self, error: Exception) -> None:
        """Twice as many passes from now on, if it was memory that was refused."""
        if not is_out_of_memory(error):
            raise error
        if self._passes >= self._count:
            raise OutOfMemory(
                "The device refused memory for a single evaluation episode; leave it more, or set eval.num_evals=0."
            ) from error
        self._passes, self._compiled = min(2 * self._passes, self._count), None
        self._report("evaluation_divided", passes=self._passes)


def policy_of(state: TrainState, key: jax.Array) -> PolicySnapshot:
    """The policy of a training state, to be evaluated in the episodes of a random key."""
    params, statistics = sharding.first_device((state.params, state.normalizer))
    return PolicySnapshot(params, statistics, key)


def counts(episodes: Episodes) -> np.ndarray:
    """Which episodes count, `[B]`: not aborted, and of a finite return, whatever the guard made of it."""
    return np.asarray((episodes.aborted == 0) & np.isfinite(episodes.metrics["reward"]))


def returns_of(episodes: Episodes) -> np.ndarray:
    """Returns, `[B]`, NaN where an episode does not count."""
    return np.where(counts(episodes), np.asarray(episodes.metrics["reward"], np.float64), np.nan)


def summarize(episodes: Episodes) -> EvaluationMetrics:
    """Mean and standard deviation of every metric over the episodes that count."""
    kept = counts(episodes)
    metrics: EvaluationMetrics = {}
    for name, values in episodes.metrics.items():
        metrics[f"eval/episode_{name}"] = float(values[kept].mean()) if kept.any() else None
        metrics[f"eval/episode_{name}_std"] = float(values[kept].std()) if kept.any() else None
    metrics["eval/avg_episode_length"] = float(episodes.length[kept].mean()) if kept.any() else None
    metrics["eval/std_episode_length"] = float(episodes.length[kept].std()) if kept.any() else None
    metrics["eval/aborted_share"] = float(1.0 - kept.mean())
    return metrics


def make_evaluator(
    config: Config, networks: Networks, compiling: Compiling, report: Callable[..., None], single: Any = None
) -> Evaluator:
    """The evaluator of a configuration; its program is compiled when it is first run.

    Args:
        config: What is evaluated, how often and on what.
        networks: The policy's.
        compiling: Context manager that tells the user what is compiling.
        report: Called as `report(kind, **fields)` with every event.
        single: The environment that the configuration says, where it is loaded already.

    Raises:
        ConfigError: `eval.env_kwargs` does not fit the environment.
    """
    env, precision = evaluation_env(config, single), level(config.precision)

    def play(params: Any, statistics: Any, keys: jax.Array, key: jax.Array) -> Episodes:
        with precision.narrow():
            return run_episodes(env, acting(config, networks, params, statistics), keys, jax.random.split(key)[0])

    programs = programs_of(config, sharding.make_mesh(1))
    return Evaluator(play, config.eval.num_envs, precision, compiling, report, programs)


def evaluation_env(config: Config, single: Any = None) -> VectorEnv:
    """The environments that episodes are played in; judged whatever `guards` says, since a NaN return is no return.

    Args:
        config: The whole configuration.
        single: The environment, where it is loaded already.
    """
    if single is None:
        single = load_env(config.env, config.eval.env_kwargs)
        if config.env.source == "import" and config.eval.env_kwargs:  # without them it is the one of training
            check(single, f"{config.env.name} with eval.env_kwargs")
    env = VectorEnv(
        DoublePhysics(single) if level(config.precision).x64 else single,
        config.env.episode_length,
        config.env.action_repeat,
        env_guards(config.guards) or env_guards(validate(GuardsConfig, {})),
    )
    return faults.faulty_env(env, config.fault) if config.fault.eval else env


def acting(config: Config, networks: Networks, params: Any, statistics: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """The acting function: actions `[B, A]` from observations and a random key, traced.

    Args:
        config: Whether the mean action is played, and in which precision.
        networks: The policy's.
        params: Of the networks.
        statistics: Of the normaliser.
    """
    matmul = level(config.precision).matmul

    def policy(obs: Any, key: jax.Array) -> jax.Array:
        selected = networks.select(obs)
        return choose_action(networks, matmul, params, statistics, selected, key, config.eval.deterministic)

    return policy
