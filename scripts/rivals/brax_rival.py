"""Does Brax's own PPO survive a fault? Trains it on an environment that goes bad, and judges what came out.

python scripts/brax_rival.py --env inverted_pendulum --backend generalized --site physics --value nan \
    --probability 1e-3 --seed 0 --steps 100000

prints one line of JSON. The trainer is `brax.training.agents.ppo.train.train` as published, with one function that jax
has dropped given back for as long as it runs, and nothing else changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import math
import time
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
EVALUATION_SEED = 2**31 - 1  # the same first states for everyone
FOREVER = np.iinfo(np.int32).max
CACHE = Path(__file__).resolve().parents[2] / ".jax_cache"
NETWORK = ("policy_hidden_layer_sizes", "value_hidden_layer_sizes")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A bad number, where it appears and how often.

    Attributes:
        site: One of `SITES`.
        value: The bad number.
        probability: Of the fault, per environment and step; at site `all` per step, at site `reset` per reset.
        first_step: First step at which it may happen, counted by each environment since training began.
        last_step: Last such step. Resets know no step: site `reset` has no window.
    """

    site: str = "none"
    value: float = math.nan
    probability: float = 0.0
    first_step: int = 0
    last_step: int = FOREVER

    def __post_init__(self):
        if self.site not in SITES:
            raise ValueError(f"site: {self.site!r} is none of {', '.join(SITES)}")


def first_element(values: jax.Array, value: jax.Array, hit: jax.Array) -> jax.Array:
    """The array with `value` as its first element where `hit`, shape and type as they were."""
    flat = values.reshape(-1)
    return flat.at[0].set(jnp.where(hit, value.astype(flat.dtype), flat[0])).reshape(values.shape)


def bad_positions(physics: Any, value: jax.Array, hit: jax.Array) -> Any:
    """The physics with a bad first position, in every place from which its backend reads it.

    Those are `q` for generalized, `qpos` for mjx, and the bodies' `x_i` for spring and positional, which only derive
    `q` from it.
    """
    changed = {name: getattr(physics, name) for name in ("q", "qpos") if hasattr(physics, name)}
    changed = {name: first_element(values, value, hit) for name, values in changed.items()}
    if hasattr(physics, "x_i"):
        changed["x_i"] = physics.x_i.replace(pos=first_element(physics.x_i.pos, value, hit))
    return physics.replace(**changed)


class FaultyBraxEnv(Wrapper):
    """An environment of Brax whose numbers go bad at random, the same way every time for the same seed.

    What is changed is the state that `step` returns:

    * `physics`: the first position in the physics, **and** the observation's first element. A simulation gone bad shows
      in the observation of the same step; the rest of that observation, the reward and `done` stay as computed.
    * `all`: the same, in every environment at the same step.
    * `warm_start`: the first element of the solver's warm start, which only the backend mjx has.
    * `observation`, `reward`, `done`: the (first) number.
    * `metrics`: the first metric; an environment without metrics is given one, `fault_probe`.
    * `info`: a leaf `fault_probe` of our own, 0 while all is well.
    * `reset`: the observation's first element, in what `reset` returns. Brax resets only before training and keeps that
      first state for its automatic resets, so a bad one comes back after every episode.

    The fault's numbers, the random key and the count of steps live in `info["fault"]`, which automatic resets leave
    alone. So they are data to the compiled training program, and all faults share one; only `reset`, which sets them,
    is compiled for each, and for site `all` for each seed too.

    Args:
        env: The environment, not batched.
        fault: What goes wrong.
        seed: Of the steps at which `all` happens, which environments must agree on.
    """

    def __init__(self, env: Env, fault: Fault, seed: int = 0):
        super().__init__(env)
        self.fault = fault
        self.seed = seed

    def reset(self, rng: jax.Array) -> State:
        """A first state, from a key of shape (2,); the fault-free environment would draw the same one."""
        state = self.env.reset(rng)
        key, draw = jax.random.split(jax.random.fold_in(rng, 1))
        value = jnp.float32(self.fault.value)
        if self.fault.site == "warm_start" and not hasattr(state.pipeline_state, "qacc_warmstart"):
            raise ValueError("warm_start: this backend's physics has none, mjx has")
        hit = (self.fault.site == "reset") & (jax.random.uniform(draw) < self.fault.probability)
        fault = {
            "site": jnp.int32(SITES.index(self.fault.site)),
            "value": value,
            "probability": jnp.float32(self.fault.probability),
            "first_step": jnp.int32(self.fault.first_step),
            "last_step": jnp.int32(self.fault.last_step),
            "count": jnp.int32(0),
            "key": key,
            "common_key": jax.random.PRNGKey(self.seed if self.fault.site == "all" else 0),
        }
        return state.replace(
            obs=jax.tree.map(lambda x: first_element(x, value, hit), state.obs),
            metrics=state.metrics or {"fault_probe": jnp.float32(0.0)},
            info={**state.info, "fault": fault, "fault_probe": jnp.float32(0.0)},
        )

    def step(self, state: State, action: jax.Array) -> State:
        """One step of the environment, then perhaps the fault."""
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
    """Whether the fault happens in this step.

    Args:
        fault: `info["fault"]` of one environment, scalars and two keys of shape (2,).

    Returns:
        By site, whether something goes bad there, `all` counted as physics; and the fault with its key and count
        moved on.
    """
    key, draw = jax.random.split(fault["key"])
    common = jax.random.fold_in(fault["common_key"], fault["count"])
    draw = jnp.where(fault["site"] == SITES.index("all"), common, draw)
    hit = jax.random.uniform(draw) < fault["probability"]
    hit &= (fault["count"] >= fault["first_step"]) & (fault["count"] <= fault["last_step"])
    at = {site: hit & (fault["site"] == index) for index, site in enumerate(SITES)}
    at["physics"] |= at["all"]
    return at, {**fault, "key": key, "count": fault["count"] + 1}


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """What jax dropped: every leaf with a leading axis over the devices, one copy on each, as `jax.pmap` wants it."""
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
    return jax.tree.map(lambda leaf: jax.device_put(jnp.stack([jnp.asarray(leaf)] * len(devices)), sharding), tree)


def brax_settings(config: Any) -> dict[str, Any]:
    """The settings for `run` that a configuration of rlstable's says (`rlstable.cli.compose.compose`).

    Raises:
        ValueError: It wants something that Brax's PPO has not.
    """
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
    env: Env,
    healthy: Env,
    seed: int,
    settings: Mapping[str, Any],
    looks: int = 0,
    look: Callable[[int, Any], None] | None = None,
) -> tuple[str | None, Callable[..., Any], Any]:
    """Runs Brax's PPO.

    Its evaluations are off. It can raise after its last update, when it compares the parameters with themselves over
    the devices, a test that NaN fails; so the parameters are taken from the callback before that.

    Args:
        env: What to train on, not batched.
        healthy: The same without the fault. Brax resets it for an evaluation that never comes.
        seed: Of everything.
        settings: Arguments of `ppo.train` by its own names, the layer sizes under `NETWORK`'s, and `total_steps`.
        looks: Number of calls of `look` at equal distances over the training; 0 for one at the end.
        look: Receives the steps so far and the parameters; None for nothing.

    Returns:
        Brax's error in one line or None, what makes a policy of parameters, and the last trained parameters
        (normalizer, policy, value), None if it did not get so far.
    """
    trained: dict[str, Any] = {"make_policy": None, "params": None}

    def keep(step: int, make_policy: Callable[..., Any], params: Any) -> None:
        if step > 0:
            trained.update(make_policy=make_policy, params=jax.device_get(params))
            if look is not None:
                look(step, trained["params"])

    arguments = dict(settings)
    sizes = {name: tuple(arguments.pop(name)) for name in NETWORK if name in arguments}
    steps = arguments.pop("total_steps")
    error = None
    with mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True):
        try:
            ppo.train(
                env,
                steps,
                eval_env=healthy,
                seed=seed,
                max_devices_per_host=1,
                num_evals=looks + 1 if looks else 0,
                run_evals=False,
                network_factory=functools.partial(ppo_networks.make_ppo_networks, **sizes),
                policy_params_fn=keep,
                **arguments,
            )
        except Exception as raised:
            error = one_line(raised)
    return error, trained["make_policy"], trained["params"]


def one_line(error: BaseException) -> str:
    """An error's type, the function that raised it, and what it says."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_code.co_name if trace else "?"
    text = " ".join(str(error).split())
    return f"{type(error).__name__} in {where}: {text}"[:300]


def evaluate(
    env: Env, make_policy: Callable[..., Any], params: Any, episodes: int = 32, length: int = 1000
) -> tuple[float | None, int]:
    """Evaluates a deterministic policy on a healthy environment; see `make_judge`."""
    return make_judge(env, make_policy, episodes, length)(params)


def make_judge(
    env: Env, make_policy: Callable[..., Any], episodes: int = 32, length: int = 1000
) -> Callable[[Any], tuple[float | None, int]]:
    """Evaluates deterministic policies on a healthy environment, all by one compiled program.

    An episode ends for good at its first number that is not finite, and all of them stop when none is left.

    Args:
        env: Not batched.
        make_policy: Brax's: from parameters to a function of observations (episodes, ...) and a key.
        episodes: How many are played at once.
        length: Steps after which an episode ends.

    Returns:
        A function of the parameters. It gives the mean return of the episodes whose actions and rewards were finite to
        their end, None if there is none; and the number of the others.
    """

    @jax.jit
    def play(params: Any, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        policy = make_policy(params, deterministic=True)

        def goes_on(carry: Any) -> jax.Array:
            _, _, alive, _, count = carry
            return alive.any() & (count < length)

        def step(carry: Any) -> Any:
            state, total, alive, good, count = carry
            action, _ = policy(state.obs, keys[0])
            state = like(jax.vmap(env.step)(state, action), state)
            total += jnp.where(alive, state.reward, 0.0)
            good &= ~alive | (jnp.isfinite(action).all(axis=-1) & jnp.isfinite(total))
            return state, total, alive & good & (state.done == 0), good, count + 1

        flags = jnp.ones(episodes, bool)
        carry = (jax.vmap(env.reset)(keys), jnp.zeros(episodes), flags, flags, jnp.int32(0))
        _, returns, _, good, _ = jax.lax.while_loop(goes_on, step, carry)
        return returns, good

    def judge(params: Any) -> tuple[float | None, int]:
        keys = jax.random.split(jax.random.PRNGKey(EVALUATION_SEED), episodes)
        returns, good = jax.device_get(play(params, keys))
        return float(returns[good].mean()) if good.any() else None, int((~good).sum())

    return judge


def like(tree: Any, other: Any) -> Any:
    """The tree with the types of another, as a loop wants it: `inverted_pendulum` returns a Python float as reward."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), tree, other)


def all_finite(tree: Any) -> bool:
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def run(env_name: str, backend: str | None, fault: Fault, seed: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Trains with the fault and judges the final policy without it.

    Args:
        env_name: One of Brax's environments.
        backend: Of its physics; None for the environment's own.
        fault: What goes wrong while training.
        seed: Of training and of the fault.
        settings: As in `train`; `brax_settings` makes them.

    Returns:
        `finished`: Brax raised nothing. `error`: what it raised, or None. `finite`: the final parameters and
        observation statistics are. `return`: as `evaluate` says; None where nothing was trained. `bad_episodes`: how
        many of its 32 episodes do not count. `seconds`: wall time of everything, compiling included.

    Raises:
        ValueError: The environment's physics has no such site.
    """
    started = time.perf_counter()
    env = envs.get_environment(env_name, **({"backend": backend} if backend else {}))
    faulty = FaultyBraxEnv(env, fault, seed)
    jax.eval_shape(faulty.reset, jax.random.PRNGKey(0))  # a site that is not there is our error, not Brax's
    error, make_policy, params = train(faulty, env, seed, settings)
    result = {"finished": error is None, "error": error, "finite": False, "return": None, "bad_episodes": None}
    if params is not None:
        result["finite"] = all_finite(params)
        result["return"], result["bad_episodes"] = evaluate(env, make_policy, params)
    return {**result, "seconds": round(time.perf_counter() - started, 2)}


def keep_compiled_programs(folder: Path = CACHE) -> None:
    """Lets later runs and other processes use what was compiled before, unless the user said where to keep it."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="inverted_pendulum")
    parser.add_argument("--backend", default=None)
    parser.add_argument("--site", default="none", choices=SITES)
    parser.add_argument("--value", type=float, default=math.nan)
    parser.add_argument("--probability", type=float, default=1e-3)
    parser.add_argument("--first-step", type=int, default=0)
    parser.add_argument("--last-step", type=int, default=FOREVER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="default: as in the environment's configuration")
    options = parser.parse_args()

    from rlstable.cli.compose import compose

    keep_compiled_programs()
    settings = brax_settings(compose([f"env={options.env}"]))
    if options.steps is not None:
        settings["total_steps"] = options.steps
    fault = Fault(options.site, options.value, options.probability, options.first_step, options.last_step)
    print(json.dumps(run(options.env, options.backend, fault, options.seed, settings)))


if __name__ == "__main__":
    main()
