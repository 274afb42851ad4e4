"""Toy environments with the Env interface of Brax, quick to compile, healthy or with built-in faults.

Pytest puts this folder on the path: `from toys import PointMass`, and in a configuration
`env: {source: import, name: "toys:PointMass", kwargs: {...}}` (from the repository's root: "tests.toys:PointMass").
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from rlstable import config
from rlstable.config import guards as guard_config
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.device.mesh import make_mesh
from rlstable.envs.resets import Resets
from rlstable.envs.vector import VectorEnv
from rlstable.faults import faulty_env
from rlstable.ppo.diagnostics import loss_metrics
from rlstable.ppo.guards import env_guards
from rlstable.ppo.initial import init_state
from rlstable.ppo.iteration import PPO
from rlstable.ppo.loss import Loss
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected, Minibatch
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import SPECS, TrainState
from rlstable.runner.setup import make_ppo

# Overrides of a run that takes a few seconds.
TINY = (
    "env=import", "ppo=default", "env.name=toys:PointMass", "env.episode_length=20", "network=small", "ppo.num_envs=8",
    "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "ppo.discounting=0.95", "ppo.learning_rate=3e-3", "total_steps=1280", "devices=1",
)  # fmt: skip
FAULTS = ("reward", "observation", "physics", "warm_start")
LIMITERS_OFF = dict.fromkeys(guard_config.LimiterConfig.model_fields)
GUARDS_OFF: dict[str, dict[str, Any]] = {
    **{name: {"enabled": False} for name in guard_config.GuardsConfig.model_fields if name != "limiters"},
    "limiters": LIMITERS_OFF,
}


@struct.dataclass
class Physics:
    """Position, velocity and solver warm start of a point. No step reads the warm start."""

    q: jax.Array
    qd: jax.Array
    warm_start: jax.Array


@struct.dataclass
class State:
    """The fields of `brax.envs.base.State`, without the 10 s that its import takes."""

    pipeline_state: Physics
    obs: Any
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, jax.Array]
    info: dict[str, Any]


class PointMass:
    """A point pushed in the plane; the episode ends when it leaves a circle.

    The end is a comparison, as in Brax, so NaN does not end an episode. Bad physics stays bad and is seen in the
    observation and the reward; other faults last for one step.
    """

    action_size = 2
    backend = "toy"

    def __init__(
        self,
        bound: float = 1.5,  # radius of the circle
        fault: str | None = None,  # one of `FAULTS`
        probability: float = 0.05,  # of a fault, per step
        value: float = float("nan"),  # the bad number
        named: bool = False,  # whether observations are a dictionary `{"state", "privileged_state"}`
        bad_resets: float = 0.0,  # share of the resets that give a bad observation
    ):
        if fault is not None and fault not in FAULTS:
            raise ValueError(f"fault: {fault!r} is none of {', '.join(FAULTS)}")
        self.bound = bound
        self.fault = fault
        self.probability = probability
        self.value = value
        self.named = named
        self.bad_resets = bad_resets

    @property
    def observation_size(self) -> Any:
        return {"state": (4,), "privileged_state": (5,)} if self.named else 4

    def reset(self, rng: jax.Array) -> State:
        key, key_bad, draw = jax.random.split(rng, 3)
        draw = jax.random.uniform(draw, (4,), minval=-0.5, maxval=0.5)
        physics = Physics(q=draw[:2], qd=draw[2:], warm_start=jnp.zeros(2))
        observation = self._observation(physics)
        if self.bad_resets:
            bad = jax.random.uniform(key_bad) < self.bad_resets
            observation = jax.tree.map(lambda x: jnp.where(bad, self.value, x), observation)
        zero = jnp.zeros(())
        return State(physics, observation, zero, zero, {"distance": zero}, {"fault_key": key})

    def step(self, state: State, action: jax.Array) -> State:
        key, draw = jax.random.split(state.info["fault_key"])
        old = state.pipeline_state
        qd = 0.9 * old.qd + 0.3 * jnp.clip(action, -1.0, 1.0)
        physics = Physics(q=old.q + 0.3 * qd, qd=qd, warm_start=action)
        hit = jax.random.uniform(draw) < self.probability
        if self.fault in ("physics", "warm_start"):
            leaf = {"physics": "q", "warm_start": "warm_start"}[self.fault]
            physics = physics.replace(**{leaf: jnp.where(hit, self.value, getattr(physics, leaf))})
        distance = jnp.sum(jnp.square(physics.q))
        reward = 1.0 - distance
        observation = self._observation(physics)
        if self.fault == "reward":
            reward = jnp.where(hit, self.value, reward)
        if self.fault == "observation":
            observation = jax.tree.map(lambda x: x.at[0].set(jnp.where(hit, self.value, x[0])), observation)
        return state.replace(
            pipeline_state=physics,
            obs=observation,
            reward=reward,
            done=jnp.where(distance > self.bound**2, 1.0, 0.0),
            metrics={"distance": distance},
            info={**state.info, "fault_key": key},
        )

    def _observation(self, physics: Physics) -> Any:
        observation = jnp.concatenate([physics.q, physics.qd])
        if not self.named:
            return observation
        return {"state": observation, "privileged_state": jnp.append(observation, jnp.sum(jnp.square(physics.q)))}


class Target:
    """The best action is 0.6 for every observation; the reward is 1 minus twice the distance, at least 0.

    About twenty tiny iterations learn it. A policy whose actions stay at their bounds earns almost nothing. Rewards are
    halved after `drop_at` steps, counted over automatic resets; 0 for never.
    """

    action_size = 1
    observation_size = 2
    backend = "toy"

    def __init__(self, drop_at: int = 0):
        self.drop_at = drop_at

    def reset(self, rng: jax.Array) -> State:
        seen = jax.random.uniform(rng, (2,), minval=-1.0, maxval=1.0)
        zero = jnp.zeros(())
        return State(Physics(seen, seen, jnp.zeros(1)), seen, zero, zero, {}, {"age": zero})

    def step(self, state: State, action: jax.Array) -> State:
        age = state.info["age"] + 1.0
        reward = jnp.maximum(1.0 - 2.0 * jnp.abs(action[0] - 0.6), 0.0)
        if self.drop_at:
            reward = jnp.where(age > self.drop_at, 0.5 * reward, reward)
        return state.replace(reward=reward, done=jnp.zeros(()), info={**state.info, "age": age})


class NamedPointMass(PointMass):
    """`PointMass` with dictionary observations."""

    def __init__(self, **kwargs: Any):
        super().__init__(named=True, **kwargs)


def tiny_config(guards: Mapping[str, Any] | None = None, **sections: Any) -> config.Config:
    """A tiny run: 8 environments, 16 unrolls of 4 steps, 2 minibatches, 2 epochs, no recovery, no incidents.

    By default all guards are off. The sections `env`, `ppo` and `network` are merged with the defaults here.
    """
    ppo = {
        "num_envs": 8, "batch_size": 8, "num_minibatches": 2, "num_updates_per_batch": 2, "unroll_length": 4,
        "learning_rate": 3e-3, "entropy_cost": 1e-2,
    }  # fmt: skip
    network = {"policy_hidden_layer_sizes": (8,), "value_hidden_layer_sizes": (8,)}
    env = {"source": "import", "name": "toys:PointMass", "episode_length": 12}
    return config.load(
        {
            "env": env | dict(sections.pop("env", {})),
            "ppo": ppo | dict(sections.pop("ppo", {})),
            "network": network | dict(sections.pop("network", {})),
            "guards": GUARDS_OFF if guards is None else guards,
            "total_steps": 10_000,
            "supervise": {"recovery": {"enabled": False}, "incident": {"enabled": False}},
            **sections,
        }
    )


def make_networks(settings: config.Config, action_size: int) -> Networks:
    return make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), action_size).networks


def settings_of(settings: config.Config) -> Settings:
    """The settings of an iteration."""
    return make_ppo(settings, VectorEnv(PointMass(), 12, 1, {}), 2).settings


def assemble(
    settings: config.Config, env: Any = None, pool_size: int = 8, faulty: bool = False
) -> tuple[PPO, TrainState]:
    """PPO on an environment (default `PointMass`), with the configured fault if `faulty`, and its first state."""
    env = PointMass() if env is None else env
    vector = VectorEnv(
        env,
        settings.env.episode_length,
        settings.env.action_repeat,
        env_guards(settings.guards),
        settings.env.reset == "pool",
        restore_info=settings.env.restore_info,
    )
    vector = faulty_env(vector, settings.fault) if faulty else vector
    resets = Resets(vector, settings.ppo.num_envs)
    env_state = resets.draw(jax.random.PRNGKey(settings.seed), settings.ppo.num_envs)
    pool = resets.pool(jax.random.PRNGKey(settings.seed + 1), pool_size) if vector.uses_pool else None
    ppo = make_ppo(settings, vector, env.action_size)
    return ppo, init_state(ppo, jax.random.PRNGKey(settings.seed + 2), env_state, pool)


def loss_and_metrics(networks: Any, ppo: PPOConfig, limits: guard_config.LimiterConfig) -> Any:
    """A function of params, statistics, minibatch and share of valid samples: the loss and its metrics."""
    loss = Loss(networks, ppo, limits)

    def call(params: Any, statistics: Any, minibatch: Minibatch, share: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        terms = loss.terms(params, statistics, minibatch, share)
        return terms.loss, loss_metrics(terms, minibatch, share, limits)

    return call


@functools.cache
def mesh(devices: int = 1) -> Any:
    """The first fake devices."""
    return make_mesh(devices)


def compiled(ppo: PPO, devices: int = 1) -> Any:
    """The iteration over devices, without donation, so that a test may use a state twice."""
    return sharding.over_devices(ppo.iteration, mesh(devices), (SPECS,), (SPECS, sharding.REPLICATED))


def placed(state: TrainState, devices: int = 1) -> TrainState:
    """The state on its devices."""
    return sharding.place(state, mesh(devices), SPECS)


def on_one_device(function: Any) -> Any:
    """Compiles a function that expects the axis of devices for a single device."""
    return sharding.over_devices(function, mesh(), sharding.REPLICATED, sharding.REPLICATED)


def assert_same(ours: Any, theirs: Any) -> None:
    """Requires equal arrays, leaf by leaf; NaN equals NaN."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(ours: Any, theirs: Any, rtol: float = 1e-5) -> None:
    """Requires arrays that differ, leaf by leaf, by a share of their numbers and of the greatest number of the leaf."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.max(np.abs(b), initial=1e-2))


def finite(tree: Any) -> bool:
    """Whether every number of every array is finite."""
    return all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(tree))


def learnt(state: TrainState) -> Any:
    return state.params, state.opt_state, state.normalizer


def equations(jaxpr: Any, inside: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The innermost equations of a program, each with its enclosing equations (loops, calls), outermost first."""
    for equation in jaxpr.eqns:
        values = equation.params.values()
        items = [item for value in values for item in (value if isinstance(value, tuple | list) else (value,))]
        parts = [part for item in items if hasattr(part := getattr(item, "jaxpr", item), "eqns")]
        if not parts:
            yield equation, inside
        for part in parts:
            yield from equations(part, (*inside, equation))


def experience(networks: Networks, steps: int, rows: int, named: bool = False, seed: int = 0) -> tuple[Any, ...]:
    """Random experience `[T, B]`, drawn by NumPy, which compiles nothing.

    The result is parameters, observation statistics, `Collected` data with truncations and terminations but without a
    mask, the slightly different parameters that collected the data, and noise for the entropy estimate.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return np.float32(rng.normal(size=shape))

    def observations(*shape: int) -> Any:
        state = normal(*shape, 4) * 2 + 1
        whole = {"state": state, "privileged_state": np.concatenate([state, state[..., :1] ** 2], -1)}
        return networks.select(whole if named else state)

    observation = observations(steps, rows)
    std = jax.tree.map(lambda x: np.linspace(0.5, 1.5, x.shape[-1], dtype=np.float32), observation)
    statistics = Statistics(WideCounter.of(100), std, jax.tree.map(np.square, std), std)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), observation)
    shapes = jax.eval_shape(networks.init, jax.random.PRNGKey(0), one)
    params = jax.tree.map(lambda x: normal(*x.shape) / np.float32(np.sqrt(x.shape[0])), shapes)
    policy = params["policy"]["params"]
    if "std_param" in policy:  # used unchanged as standard deviations, so positive
        policy["std_param"]["value"] = np.float32([0.5, 1.2])
    if "Dense_1" in policy and networks.config.noise_std_type == "scalar":
        policy["Dense_1"]["bias"] += 4.0
    old = jax.tree.map(lambda x: x + np.float32(0.03) * normal(*x.shape), params)
    size = networks.action_size
    raw, log_prob, distribution, value = _collected(networks, old, statistics, observation, normal(steps, rows, size))
    end = rng.choice(3, (steps, rows), p=(0.7, 0.15, 0.15))
    data = Collected(
        observation=observation,
        raw_action=raw,
        log_prob=log_prob,
        distribution=distribution,
        value=value,
        reward=normal(steps, rows),
        truncation=np.float32(end == 1),
        termination=np.float32(end == 2),
        valid=None,
        time_out=None,
        bootstrap_observation=observations(1, rows),
    )
    return jax.tree.map(jnp.asarray, (params, statistics, data, old, normal(steps, rows, size)))


def minibatch_of(data: Collected, noise: Any = None, **more: Any) -> Minibatch:
    """Collected data `[T, B]` as a minibatch; by default without targets and reference, and with zero noise."""
    noise = jnp.zeros(data.log_prob.shape) if noise is None else noise
    return Minibatch(**{"targets": None, "reference": None} | more, collected=data, noise=noise)


@functools.partial(jax.jit, static_argnums=0)
def _collected(networks: Networks, params: Any, statistics: Any, observation: Any, noise: jax.Array) -> tuple[Any, ...]:
    distribution, _ = networks.distribution(params, statistics, observation)
    raw = distribution.sample(noise)
    return raw, distribution.log_prob(raw), distribution, networks.value(params, statistics, observation)


def step_alone(env: VectorEnv, state: Any, action: jax.Array, pool: Any, key: jax.Array, guards: Any) -> Any:
    """Steps a vectorised environment in an iteration of one step, so noted rows of the pool are cached at once."""
    step = env.step(env.begin(state, pool), action, pool, key, guards)
    return step._replace(state=env.end(step.state, pool))
