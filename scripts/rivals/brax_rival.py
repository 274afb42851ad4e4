"""Trains Brax's own PPO on an environment with a fault, and evaluates the policy without the fault.

The trainer is `brax.training.agents.ppo.train.train` as published.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from brax.envs.base import Env, State, Wrapper

from rlstable.cli.compose import compose
from rlstable.compilation.xla import disable_async_dispatch
from rlstable.config import ConfigError
from rlstable.config.faults import FaultConfig
from rlstable.envs.episodes import Episodes, run_episodes
from rlstable.envs.load import load_env
from rlstable.envs.vector import VectorEnv
from rlstable.faults.env import FaultyEnv
from rlstable.faults.injection import Injection, as_data
from rlstable.guards.env import Quarantine
from scripts.bench.leg import brax_settings
from scripts.results import Row
from scripts.rivals import brax_trainer

EVALUATION_SEED = 2**31 - 1  # the same first states for all policies
CACHE = Path(__file__).resolve().parents[2] / ".jax_cache"


class FaultyBraxEnv(Wrapper):
    """A Brax environment with the faults of `rlstable.faults`.

    The fault and the count of steps are in `info`, which automatic resets leave unchanged. They are data of the
    training program, so that all faults share one compiled program.

    Brax resets only before training and uses that first state for its automatic resets, so that a bad first state
    comes back after every episode.
    """

    def __init__(
        self,
        env: Env,
        fault: FaultConfig,
        steps: int = 1,  # steps of an environment in an iteration, in which a fault counts its start and its end
    ):
        super().__init__(env)
        self._fault = as_data(fault)
        self._steps = steps

    def reset(self, rng: jax.Array) -> State:
        state = FaultyEnv(self.env, Injection(self._fault, jnp.ones((), bool))).reset(rng)
        return state.replace(info={**state.info, "fault": self._fault, "fault_steps": jnp.uint32(0)})

    def step(self, state: State, action: jax.Array) -> State:
        fault, count = state.info["fault"], state.info["fault_steps"]
        iteration = count // self._steps
        active = (iteration >= fault.start) & (iteration < fault.end)
        state = FaultyEnv(self.env, Injection(fault, active)).step(state, action)
        return state.replace(info={**state.info, "fault": fault, "fault_steps": count + 1})


class Saved(NamedTuple):
    """A policy during training."""

    step: int
    make: Callable[..., Any]  # Brax's `make_policy`
    params: Any


def train(
    overrides: Sequence[str], seeds: range, evaluations: int = 0, episodes: int = 32, fault: FaultConfig | None = None
) -> Iterator[Row]:
    """Trains the seeds one after another, and evaluates their policies at equal distances, without the fault.

    Without `evaluations` a row has the return of the last policy only. A stop reason other than `completed` is an error
    of Brax. A ConfigError if Brax leaves no policy, though it has no fault.
    """
    disable_async_dispatch()  # for C MuJoCo, which is called by programs of this process
    config = compose([*overrides, "devices=1"])
    env, steps = load_env(config.env), config.ppo.rows * config.ppo.unroll_length // config.ppo.num_envs
    trained_on = env if fault is None else FaultyBraxEnv(env, fault, steps)
    for seed in seeds:
        error, saved = _train(trained_on, env, brax_settings(config, seed), evaluations)
        if not saved and fault is None:
            raise ConfigError(f"Brax's PPO: {error}")
        returns = _returns(env, saved, episodes, config.env.episode_length)
        yield {
            "seed": seed, "steps": [own.step for own in saved], "returns": returns,
            "return": returns[-1] if returns else None, "stop_reason": error or "completed",
        }  # fmt: skip


def _train(env: Env, healthy: Env, settings: Mapping[str, Any], evaluations: int) -> tuple[str | None, list[Saved]]:
    """Runs Brax's PPO with the settings of `rivals/brax_ppo.py`; returns an error, and the policies.

    Brax's own evaluations are off. Brax can raise after its last update, when it compares the parameters with
    themselves over the devices, a test that NaN fails. The parameters therefore come from the callback before.
    """
    saved: list[Saved] = []

    def keep(step: int, make_policy: Callable[..., Any], params: Any) -> None:
        if step > 0:
            saved.append(Saved(step, make_policy, jax.device_get(params)))

    own = {"max_devices_per_host": 1, "num_evals": evaluations + 1 if evaluations else 0, "run_evals": False}
    try:
        brax_trainer.train(env, settings, eval_env=healthy, policy_params_fn=keep, **own)
    except Exception as raised:
        where = traceback.extract_tb(raised.__traceback__)[-1].name
        return f"{type(raised).__name__} in {where}: {' '.join(str(raised).split())}"[:300], saved
    return None, saved


def _returns(env: Env, saved: Sequence[Saved], episodes: int, length: int) -> list[float | None]:
    """Returns the mean returns of the policies' mean actions."""
    envs = VectorEnv(env, length, 1, {"quarantine": Quarantine()})

    @jax.jit
    def play(params: Any) -> Episodes:
        policy, key = saved[0].make(params, deterministic=True), jax.random.PRNGKey(EVALUATION_SEED)
        return run_episodes(envs, lambda obs, key: policy(obs, key)[0], jax.random.split(key, episodes), key)

    return [mean_return(jax.device_get(play(own.params))) for own in saved]


def mean_return(episodes: Episodes) -> float | None:
    """Returns the mean return of the episodes that stayed finite; None if there are none."""
    returns = episodes.metrics["reward"]
    kept = (episodes.aborted == 0) & np.isfinite(returns)
    return float(returns[kept].mean()) if kept.any() else None


def keep_compiled_programs(folder: Path = CACHE) -> None:
    """Caches compiled programs in a folder for later processes, unless the user has set another folder."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
