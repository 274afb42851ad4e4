"""Trains Brax's own PPO on an environment with a fault, and evaluates the policy without the fault.

The trainer is `brax.training.agents.ppo.train.train` as published. While it runs, JAX has back one function that newer
versions dropped. Nothing else is changed.
"""

import dataclasses
import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from brax.envs.base import Env, State, Wrapper
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo

from rlstable.envs.episodes import Episodes, run_episodes
from rlstable.envs.vector import VectorEnv
from rlstable.guards.env import Quarantine
from scripts.rivals.replicated import device_put_replicated

SITES = ("none", "physics", "warm_start", "observation", "reward", "done", "metrics", "info", "reset", "all")
EVALUATION_SEED = 2**31 - 1  # the same first states for all policies
FOREVER = np.iinfo(np.int32).max
CACHE = Path(__file__).resolve().parents[2] / ".jax_cache"


@dataclasses.dataclass(frozen=True)
class Fault:
    site: str = "none"  # one of `SITES`
    value: float = math.nan  # the bad number
    probability: float = 0.0  # probability per environment and step; at site `all` per step, at site `reset` per reset
    first_step: int = 0  # first step with the fault, counted by each environment since training began
    last_step: int = FOREVER  # last step with the fault. Site `reset` ignores both steps


def first_element(values: jax.Array, value: jax.Array, hit: jax.Array) -> jax.Array:
    flat = values.reshape(-1)
    return flat.at[0].set(jnp.where(hit, value.astype(flat.dtype), flat[0])).reshape(values.shape)


def bad_positions(physics: Any, value: jax.Array, hit: jax.Array) -> Any:
    """Sets a bad first position where a backend reads it: `q` (generalized), `qpos` (mjx) or `x_i`."""
    changed = {name: getattr(physics, name) for name in ("q", "qpos") if hasattr(physics, name)}
    changed = {name: first_element(values, value, hit) for name, values in changed.items()}
    if hasattr(physics, "x_i"):
        changed["x_i"] = physics.x_i.replace(pos=first_element(physics.x_i.pos, value, hit))
    return physics.replace(**changed)


class FaultyBraxEnv(Wrapper):
    """A Brax environment with random faults, which are the same for the same seed.

    The first number of a site becomes bad in the state that `step` returns: `physics` in its position and in the
    observation, `all` the same in every environment at the same step, `warm_start` in that of MJX's solver, `metrics`
    in the first metric or `fault_probe`, `info` in a leaf `fault_probe`, `reset` in what `reset` returns.

    Brax resets only before training and uses that first state for its automatic resets, so that a bad first state
    comes back after every episode.

    The fault's numbers, the random key and the count of steps are in `info["fault"]`, which automatic resets leave
    unchanged. They are data of the training program, so that all faults share one compiled program.
    """

    def __init__(self, env: Env, fault: Fault, seed: int = 0):
        super().__init__(env)
        self.fault = fault
        self.seed = seed

    def reset(self, rng: jax.Array) -> State:
        state = self.env.reset(rng)
        key, draw = jax.random.split(jax.random.fold_in(rng, 1))
        value = jnp.float32(self.fault.value)
        hit = (self.fault.site == "reset") & (jax.random.uniform(draw) < self.fault.probability)
        fault = {
            "site": jnp.int32(SITES.index(self.fault.site)), "value": value,
            "probability": jnp.float32(self.fault.probability), "first_step": jnp.int32(self.fault.first_step),
            "last_step": jnp.int32(self.fault.last_step), "count": jnp.int32(0), "key": key,
            "common_key": jax.random.PRNGKey(self.seed if self.fault.site == "all" else 0),
        }  # fmt: skip
        return state.replace(
            obs=jax.tree.map(lambda x: first_element(x, value, hit), state.obs),
            metrics=state.metrics or {"fault_probe": jnp.float32(0.0)},
            info={**state.info, "fault": fault, "fault_probe": jnp.float32(0.0)},
        )

    def step(self, state: State, action: jax.Array) -> State:
        fault = state.info["fault"]
        stepped = self.env.step(state, action)
        key, draw = jax.random.split(fault["key"])
        common = jax.random.fold_in(fault["common_key"], fault["count"])
        draw = jnp.where(fault["site"] == SITES.index("all"), common, draw)
        hit = jax.random.uniform(draw) < fault["probability"]
        hit &= (fault["count"] >= fault["first_step"]) & (fault["count"] <= fault["last_step"])
        at = {site: hit & (fault["site"] == index) for index, site in enumerate(SITES)}
        at["physics"] |= at["all"]
        fault, value = {**fault, "key": key, "count": fault["count"] + 1}, fault["value"]
        physics = bad_positions(stepped.pipeline_state, value, at["physics"])
        if hasattr(physics, "qacc_warmstart"):
            warm_start = first_element(physics.qacc_warmstart, value, at["warm_start"])
            physics = physics.replace(qacc_warmstart=warm_start)
        metrics = dict(stepped.metrics or {"fault_probe": jnp.float32(0.0)})
        name = next(iter(sorted(metrics)))
        metrics[name] = jnp.where(at["metrics"], value, metrics[name])
        seen = at["physics"] | at["observation"]
        return stepped.replace(
            pipeline_state=physics,
            obs=jax.tree.map(lambda x: first_element(x, value, seen), stepped.obs),
            reward=jnp.where(at["reward"], value, stepped.reward),
            done=jnp.where(at["done"], value, stepped.done),
            metrics=metrics,
            info={**stepped.info, "fault": fault, "fault_probe": jnp.where(at["info"], value, 0.0)},
        )


def train(
    env: Env, healthy: Env, settings: Mapping[str, Any], evaluations: int = 0,
    evaluate: Callable[[int, Any], None] | None = None,
) -> tuple[str | None, Callable[..., Any], Any]:  # fmt: skip
    """Runs Brax's PPO with the settings of `rivals/brax_ppo.py`; returns an error, the policy's maker and parameters.

    Brax's own evaluations are off. Brax can raise after its last update, when it compares the parameters with
    themselves over the devices, a test that NaN fails. The parameters therefore come from the callback before.
    """
    make, params, error = None, None, None

    def keep(step: int, make_policy: Callable[..., Any], found: Any) -> None:
        nonlocal make, params
        if step > 0:
            make, params = make_policy, jax.device_get(found)
            if evaluate is not None:
                evaluate(step, params)

    known = inspect.signature(ppo.train).parameters
    arguments = {name: value for name, value in settings["train"].items() if name in known} | {
        "max_devices_per_host": 1, "num_evals": evaluations + 1 if evaluations else 0, "run_evals": False,
        "network_factory": functools.partial(ppo_networks.make_ppo_networks, **settings["networks"]),
    }  # fmt: skip
    with mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True):
        try:
            ppo.train(env, eval_env=healthy, policy_params_fn=keep, **arguments)
        except Exception as raised:
            where = traceback.extract_tb(raised.__traceback__)[-1].name
            error = f"{type(raised).__name__} in {where}: {' '.join(str(raised).split())}"[:300]
    return error, make, params


def make_evaluation(
    env: Env, make_policy: Callable[..., Any], episodes: int = 32, length: int = 1000
) -> Callable[[Any], float | None]:
    """Returns an evaluation of the mean action on an environment without a fault."""
    envs = VectorEnv(env, length, 1, {"quarantine": Quarantine()})

    @jax.jit
    def play(params: Any) -> Episodes:
        policy, key = make_policy(params, deterministic=True), jax.random.PRNGKey(EVALUATION_SEED)
        return run_episodes(envs, lambda obs, key: policy(obs, key)[0], jax.random.split(key, episodes), key)

    return lambda params: mean_return(jax.device_get(play(params)))


def mean_return(episodes: Episodes) -> float | None:
    """Returns the mean return of the episodes that stayed finite; None if there are none."""
    returns = episodes.metrics["reward"]
    kept = (episodes.aborted == 0) & np.isfinite(returns)
    return float(returns[kept].mean()) if kept.any() else None


def all_finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def keep_compiled_programs(folder: Path = CACHE) -> None:
    """Caches compiled programs in a folder for later processes, unless the user has set another folder."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
