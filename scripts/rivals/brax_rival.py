"""Trains Brax's own PPO on an environment with a fault, and evaluates the policy without the fault.

The trainer is `brax.training.agents.ppo.train.train` as published. While it runs, JAX has back one function that newer
versions dropped. Nothing else is changed.
"""

import dataclasses
import functools
import inspect
import math
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from brax import envs
from brax.envs.base import Env, State, Wrapper
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SITES = ("none", "physics", "warm_start", "observation", "reward", "done", "metrics", "info", "reset", "all")
EVALUATION_SEED = 2**31 - 1  # the same first states for all policies
FOREVER = np.iinfo(np.int32).max
CACHE = Path(__file__).resolve().parents[2] / ".jax_cache"
NETWORK = ("policy_hidden_layer_sizes", "value_hidden_layer_sizes")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A bad number, its site and its probability."""

    site: str = "none"  # one of `SITES`
    value: float = math.nan  # the bad number
    probability: float = 0.0  # probability per environment and step; at site `all` per step, at site `reset` per reset
    first_step: int = 0  # first step with the fault, counted by each environment since training began
    last_step: int = FOREVER  # last step with the fault. Site `reset` ignores both steps

    def __post_init__(self):
        if self.site not in SITES:
            raise ValueError(f"site: {self.site!r} is not one of {', '.join(SITES)}")


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

    | site | changed in the state that `step` returns |
    | --- | --- |
    | `physics` | the first position in the physics, and the observation's first element; reward and `done` stay |
    | `all` | the same, in every environment at the same step |
    | `warm_start` | the first element of the solver's warm start, which only the backend mjx has |
    | `observation`, `reward`, `done` | the (first) number |
    | `metrics` | the first metric; an environment without metrics gets one, `fault_probe` |
    | `info` | an extra leaf `fault_probe`, 0 without a fault |
    | `reset` | the observation's first element, in the state that `reset` returns |

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
        if self.fault.site == "warm_start" and not hasattr(state.pipeline_state, "qacc_warmstart"):
            raise ValueError("warm_start: this backend's physics has none, mjx has")
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
        at, fault = draw_fault(fault)
        value = fault["value"]
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


def draw_fault(fault: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    key, draw = jax.random.split(fault["key"])
    common = jax.random.fold_in(fault["common_key"], fault["count"])
    draw = jnp.where(fault["site"] == SITES.index("all"), common, draw)
    hit = jax.random.uniform(draw) < fault["probability"]
    hit &= (fault["count"] >= fault["first_step"]) & (fault["count"] <= fault["last_step"])
    at = {site: hit & (fault["site"] == index) for index, site in enumerate(SITES)}
    at["physics"] |= at["all"]
    return at, {**fault, "key": key, "count": fault["count"] + 1}


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Copies every leaf to each device, on a leading axis, as the function did that JAX dropped."""
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
    return jax.tree.map(lambda leaf: jax.device_put(jnp.stack([jnp.asarray(leaf)] * len(devices)), sharding), tree)


def brax_settings(config: Any) -> dict[str, Any]:
    values = config.ppo.model_dump()
    schedule = values.pop("learning_rate_schedule")
    if schedule not in ("constant", "adaptive_kl"):
        raise ValueError(f"learning_rate_schedule: Brax has no {schedule}")
    known = inspect.signature(ppo.train).parameters
    return {
        **{name: value for name, value in values.items() if name in known},
        **{name: getattr(config.network, name) for name in NETWORK},
        "learning_rate_schedule": "ADAPTIVE_KL" if schedule == "adaptive_kl" else None,
        "episode_length": config.env.episode_length,
        "action_repeat": config.env.action_repeat,
        "total_steps": config.total_steps,
    }


def train(
    env: Env, healthy: Env, seed: int, settings: Mapping[str, Any], evaluations: int = 0,
    evaluate: Callable[[int, Any], None] | None = None,
) -> tuple[str | None, Callable[..., Any], Any]:  # fmt: skip
    """Runs Brax's PPO.

    Brax's own evaluations are off. Brax can raise after its last update, when it compares the parameters with
    themselves over the devices, a test that NaN fails. The parameters therefore come from the callback before.
    """
    trained: dict[str, Any] = {"make_policy": None, "params": None}

    def keep(step: int, make_policy: Callable[..., Any], params: Any) -> None:
        if step > 0:
            trained.update(make_policy=make_policy, params=jax.device_get(params))
            if evaluate is not None:
                evaluate(step, trained["params"])

    arguments = dict(settings)
    sizes = {name: tuple(arguments.pop(name)) for name in NETWORK if name in arguments}
    steps = arguments.pop("total_steps")
    error = None
    with mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True):
        try:
            ppo.train(
                env, steps, eval_env=healthy, seed=seed, max_devices_per_host=1,
                num_evals=evaluations + 1 if evaluations else 0, run_evals=False,
                network_factory=functools.partial(ppo_networks.make_ppo_networks, **sizes), policy_params_fn=keep,
                **arguments,
            )  # fmt: skip
        except Exception as raised:
            error = one_line(raised)
    return error, trained["make_policy"], trained["params"]


def one_line(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1].name
    return f"{type(error).__name__} in {where}: {' '.join(str(error).split())}"[:300]


def make_evaluation(
    env: Env, make_policy: Callable[..., Any], episodes: int = 32, length: int = 1000
) -> Callable[[Any], tuple[float | None, int]]:
    """Returns an evaluation of the mean action on an environment without a fault.

    It returns the mean return of the episodes in which all actions and rewards were finite (None if there are none),
    and the number of the other episodes, which end at the first number that is not finite.
    """

    @jax.jit
    def play(params: Any, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy = make_policy(params, deterministic=True)

        def running(carry: Any) -> jax.Array:
            _, _, alive, _, count = carry
            return alive.any() & (count < length)

        def step(carry: Any) -> Any:
            state, total, alive, good, count = carry
            action, _ = policy(state.obs, keys[0])
            # `inverted_pendulum` returns a Python float as reward.
            state = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), jax.vmap(env.step)(state, action), state)
            total += jnp.where(alive, state.reward, 0.0)
            good &= ~alive | (jnp.isfinite(action).all(axis=-1) & jnp.isfinite(total))
            return state, total, alive & good & (state.done == 0), good, count + 1

        flags = jnp.ones(episodes, bool)
        carry = (jax.vmap(env.reset)(keys), jnp.zeros(episodes), flags, flags, jnp.int32(0))
        _, returns, _, good, _ = jax.lax.while_loop(running, step, carry)
        return returns, good

    def evaluate(params: Any) -> tuple[float | None, int]:
        keys = jax.random.split(jax.random.PRNGKey(EVALUATION_SEED), episodes)
        returns, good = jax.device_get(play(params, keys))
        return float(returns[good].mean()) if good.any() else None, int((~good).sum())

    return evaluate


def all_finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def run(env_name: str, backend: str | None, fault: Fault, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains with the fault and evaluates the final policy without it."""
    started = time.perf_counter()
    env = envs.get_environment(env_name, **({"backend": backend} if backend else {}))
    faulty = FaultyBraxEnv(env, fault, seed)
    jax.eval_shape(faulty.reset, jax.random.PRNGKey(0))  # so that a missing site raises here and not inside Brax
    error, make_policy, params = train(faulty, env, seed, settings)
    result = {"finished": error is None, "error": error, "finite": False, "return": None, "bad_episodes": None}
    if params is not None:
        result["finite"] = all_finite(params)
        result["return"], result["bad_episodes"] = make_evaluation(env, make_policy)(params)
    return {**result, "seconds": round(time.perf_counter() - started, 2)}


def keep_compiled_programs(folder: Path = CACHE) -> None:
    """Caches compiled programs in a folder for later processes, unless the user has set another folder."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
