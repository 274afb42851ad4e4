"""What the policy is worth: one episode per evaluation environment, aborted ones left out and reported."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlstable import faults, sharding
from rlstable.config import Config
from rlstable.envs.double import DoublePhysics
from rlstable.envs.load import load_env
from rlstable.envs.wrappers import Episodes, VectorEnv, run_episodes
from rlstable.guard_config import GuardsConfig
from rlstable.guards.env import env_guards
from rlstable.policy import choose_action
from rlstable.ppo.networks import Networks
from rlstable.ppo.state import TrainState
from rlstable.precision import level


@dataclasses.dataclass
class Evaluator:
    """Plays evaluation episodes with the current policy.

    Attributes:
        program: The compiled program, (params, statistics, key) to `Episodes`.
        walltime: Seconds spent in it so far.
    """

    program: Callable[..., Episodes]
    walltime: float = 0.0

    def run(self, state: TrainState, key: jax.Array) -> dict[str, float | None]:
        """Metrics under `eval/`; means are over episodes that were not aborted, None when none is left."""
        started = time.perf_counter()
        params, statistics = sharding.first_device((state.params, state.normalizer))
        episodes = jax.device_get(self.program(params, statistics, key))
        elapsed = time.perf_counter() - started
        self.walltime += elapsed
        metrics = summarize(episodes)
        metrics["eval/epoch_eval_time"] = elapsed
        metrics["eval/sps"] = float(episodes.length.sum()) / elapsed
        metrics["eval/walltime"] = self.walltime
        return metrics


def summarize(episodes: Episodes) -> dict[str, float | None]:
    """Mean and standard deviation of every metric over the episodes that count.

    A return that is not finite counts as aborted too, whatever the guard made of it.
    """
    kept = (episodes.aborted == 0) & np.isfinite(episodes.metrics["reward"])
    metrics: dict[str, float | None] = {}
    for name, values in episodes.metrics.items():
        metrics[f"eval/episode_{name}"] = float(values[kept].mean()) if kept.any() else None
        metrics[f"eval/episode_{name}_std"] = float(values[kept].std()) if kept.any() else None
    metrics["eval/avg_episode_length"] = float(episodes.length[kept].mean()) if kept.any() else None
    metrics["eval/std_episode_length"] = float(episodes.length[kept].std()) if kept.any() else None
    metrics["eval/aborted_share"] = float(1.0 - kept.mean())
    return metrics


def make_evaluator(config: Config, networks: Networks, compiling: Callable[[str], Any]) -> Evaluator:
    """The evaluator of a configuration; its program is compiled when it is first run.

    Evaluation judges its environments whatever `guards` says: a NaN return is no return.

    Args:
        config: What is evaluated, how often and on what.
        networks: The policy's.
        compiling: Context manager that tells the user what is compiling.

    Raises:
        ConfigError: `eval.env_kwargs` does not fit the environment.
    """
    precision = level(config.precision)
    single = load_env(config.env, config.eval.env_kwargs)
    env = VectorEnv(
        DoublePhysics(single) if precision.x64 else single,
        config.env.episode_length,
        config.env.action_repeat,
        env_guards(config.guards) or env_guards(GuardsConfig()),
    )
    if config.fault.eval:
        env = faults.faulty_env(env, config.fault)

    def episodes(params: Any, statistics: Any, key: jax.Array) -> Episodes:
        key, key_resets = jax.random.split(key)

        def policy(obs: Any, key: jax.Array) -> jax.Array:
            selected = networks.select(obs)
            return choose_action(
                networks,
                precision.matmul,
                params,
                statistics,
                selected,
                key,
                config.eval.deterministic,
            )

        with precision.narrow():
            return run_episodes(env, policy, jax.random.split(key_resets, config.eval.num_envs), key)

    compiled: dict[str, Any] = {}

    def program(*args: Any) -> Episodes:
        with precision.compiled():
            if "evaluation" not in compiled:
                with compiling("evaluation"):
                    compiled["evaluation"] = jax.jit(episodes).lower(*args).compile()
            return compiled["evaluation"](*args)

    return Evaluator(program)
