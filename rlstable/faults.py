"""Faults on purpose: what goes wrong in real runs, injected deterministically from the seed.

Which fault, when, how often and how large are data of the training state, so that one compiled program runs them all.
An injection stands where the real thing would: between environment and guards, between loss and optimizer. Training
itself knows nothing of it.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlstable.config import ConfigError
from rlstable.counter import WideCounter
from rlstable.envs.wrappers import VectorEnv
from rlstable.fault_config import FaultConfig
from rlstable.guards.base import select
from rlstable.guards.env import physics
from rlstable.io.checkpoint import Checkpoints
from rlstable.ppo.iteration import PPO
from rlstable.ppo.optimizer import Candidate, Optimizer
from rlstable.ppo.rollout import Collected
from rlstable.ppo.state import Metrics, TrainState
from rlstable.supervise_config import MATMUL_LEVELS

SITES = FaultConfig.sites()
_FOREVER = 2**32 - 1
_POSITIONS = ("q", "qpos")
# What an environment with a fault has more in `info` and metrics; not every one has metrics, or floats in `info`.
PROBES = _KEY, _PROBE = ("injection_key", "injection_probe")


class Fault(NamedTuple):
    """A fault as data, scalars.

    Attributes:
        site: int32, index in SITES.
        value: float32, the bad number, or what another one is multiplied by.
        probability: float32, per chance: an environment's step, a sample, a minibatch.
        start: uint32, the first iteration, counted from 0.
        end: uint32, the first one without it.
    """

    site: jax.Array
    value: jax.Array
    probability: jax.Array
    start: jax.Array
    end: jax.Array


def as_data(config: FaultConfig) -> Fault:
    """The fault of a configuration that has one."""
    end = _FOREVER if config.iterations is None else config.start + config.iterations
    return Fault(
        jnp.int32(SITES.index(str(config.site))),
        jnp.float32(config.number),
        jnp.float32(config.chance),
        jnp.uint32(config.start),
        jnp.uint32(end),
    )


class Injection(NamedTuple):
    """A fault at work in one iteration.

    Attributes:
        fault: Which.
        active: Whether this iteration has it, bool scalar.
    """

    fault: Fault
    active: jax.Array

    def hits(self, site: str, key: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
        """Where the fault strikes at a site, bool of `shape`."""
        mine = (self.fault.site == SITES.index(site)) & self.active
        return mine & (jax.random.uniform(key, shape) < self.fault.probability)

    def put(self, site: str, key: jax.Array, x: Any) -> jax.Array:
        """The number `x` with the bad one in its place, or untouched."""
        return jnp.where(self.hits(site, key), self.fault.value, jnp.asarray(x, jnp.float32))


class FaultyEnv:
    """One environment whose steps and resets go wrong.

    Args:
        env: A healthy one.
        injection: What happens to it.
    """

    def __init__(self, env: Any, injection: Injection):
        self._env = env
        self._injection = injection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, rng: jax.Array) -> Any:
        """A first state, by chance with NaN in physics and observation."""
        state = self._env.reset(rng)
        key, key_reset = jax.random.split(jax.random.fold_in(rng, 1))
        hit = self._injection.hits("reset", key_reset)
        state = _spoil_physics(state, _POSITIONS, hit, self._injection.fault.value)
        state = state.replace(obs=_spoil_observation(state.obs, hit, self._injection.fault.value))
        zero = jnp.zeros(())
        info = {**state.info, _KEY: key, _PROBE: zero}
        return state.replace(info=info, metrics={**state.metrics, _PROBE: zero})

    def step(self, state: Any, action: jax.Array) -> Any:
        """A step; what it gives back may be bad."""
        injection, value = self._injection, self._injection.fault.value
        info = dict(state.info)
        key, probe = info.pop(_KEY), info.pop(_PROBE)
        key, draw = jax.random.split(key)
        action = action.at[0].set(injection.put("action", draw, action[0]))
        metrics = {name: x for name, x in state.metrics.items() if name != _PROBE}
        state = self._env.step(state.replace(info=info, metrics=metrics), action)
        simulation, warm_start = injection.hits("physics", draw), injection.hits("warm_start", draw)
        state = _spoil_physics(state, _POSITIONS, simulation, value)
        state = _spoil_physics(state, ("qacc_warmstart",), warm_start, value)
        # A simulation that has gone bad is seen in the same step.
        seen = simulation | injection.hits("observation", draw)
        info = {**state.info, _KEY: key, _PROBE: injection.put("info", draw, probe)}
        return state.replace(
            obs=_spoil_observation(state.obs, seen, value),
            reward=injection.put("reward", draw, state.reward),
            done=injection.put("done", draw, state.done),
            metrics={**state.metrics, _PROBE: injection.put("metrics", draw, jnp.zeros(()))},
            info=info,
        )


def _spoil_physics(state: Any, names: tuple[str, ...], hit: jax.Array, value: jax.Array) -> Any:
    """The first element of the named leaves of the physics, where it has them."""
    simulated = physics(state)
    field = "pipeline_state" if hasattr(state, "pipeline_state") else "data"
    found = {name: getattr(simulated, name) for name in names if getattr(simulated, name, None) is not None}
    spoilt = {name: x.at[0].set(jnp.where(hit, value.astype(x.dtype), x[0])) for name, x in found.items()}
    return state.replace(**{field: simulated.replace(**spoilt)}) if spoilt else state


def _spoil_observation(observation: Any, hit: jax.Array, value: jax.Array) -> Any:
    """The first element of every part."""
    return jax.tree.map(lambda x: x.at[..., 0].set(jnp.where(hit, value.astype(x.dtype), x[..., 0])), observation)


@dataclasses.dataclass(frozen=True)
class FaultyOptimizer(Optimizer):
    """An optimizer that by chance computes as if parameters, moments and epsilon were float16.

    The failure of TRELLIS: the second moment of a small gradient and epsilon both underflow, and the step is 0 / 0.
    """

    injection: Injection

    def candidate(
        self, gradients: Any, gradient_norm: jax.Array, opt_state: Any, params: Any, rate: jax.Array, *more: Any
    ) -> Candidate:
        """The candidate, in float16 where the fault strikes."""
        healthy = super().candidate(gradients, gradient_norm, opt_state, params, rate, *more)
        mean, square = (_half(optax.tree.get(healthy.opt_state, name)) for name in ("mu", "nu"))
        epsilon = _half(jnp.float32(self.config.optimizer.eps))
        halved = jax.tree.map(lambda p, m, v: _half(p) - rate * m / (jnp.sqrt(v) + epsilon), params, mean, square)
        hit = self.injection.hits("adam", _key_of(gradient_norm))
        state = optax.tree.set(healthy.opt_state, mu=mean, nu=square)
        step = optax.global_norm(jax.tree.map(jnp.subtract, halved, params))
        return healthy._replace(
            params=select(~hit, healthy.params, halved),
            opt_state=select(~hit, healthy.opt_state, state),
            update_norm=jnp.where(hit, step, healthy.update_norm),
        )


def _half(tree: Any) -> Any:
    """Numbers as float16 has them, its subnormal ones zero. A mere cast to and fro is removed by the compiler."""
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10), tree)


def _key_of(x: jax.Array) -> jax.Array:
    """A random key from the bits of a number that is the same on every device."""
    return jax.random.PRNGKey(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32))


@dataclasses.dataclass(frozen=True)
class _ArmedPPO(PPO):
    """PPO in an iteration that has a fault."""

    injection: Injection

    def _collect(self, state: TrainState, key: jax.Array) -> Collected:
        """The experience, with what the policy and value networks would have got wrong."""
        rollout = super()._collect(state, key)
        data, value = rollout.data, self.injection.fault.value
        key = jax.random.fold_in(key, 1)
        blind = self.injection.hits("policy_std", key, data.log_prob.shape)
        shifted = self.injection.hits("log_ratio", key, data.log_prob.shape)
        scale = jnp.where(blind[..., None], value, data.distribution.scale)
        log_prob = jnp.where(shifted, data.log_prob + value, data.log_prob)
        distribution = dataclasses.replace(data.distribution, scale=scale)
        # The logarithm of a negative deviation is NaN, as it is where a policy computes it.
        log_prob = jnp.where(blind, distribution.log_prob(data.raw_action), log_prob)
        return rollout._replace(data=data._replace(distribution=distribution, log_prob=log_prob))

    def gradient(self, *args: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The gradient of a minibatch, with what its computation would have got wrong."""
        gradients, metrics = super().gradient(*args)
        injection, value = self.injection, self.injection.fault.value
        key = _key_of(metrics["training/total_loss"])
        metrics["training/kl_mean"] = injection.put("kl", key, metrics["training/kl_mean"])
        if "training/kl_update" in metrics:
            metrics["training/kl_update"] = injection.put("kl", key, metrics["training/kl_update"])
        overflow = injection.hits("loss", key)
        metrics["training/total_loss"] = jnp.where(overflow, value, metrics["training/total_loss"])
        factor = jnp.where(injection.hits("value_loss", key), value, 1.0)
        gradients = {**gradients, "value": jax.tree.map(lambda g: g * factor, gradients["value"])}
        leaves, structure = jax.tree.flatten(gradients)
        leaves = [jnp.where(overflow, value, leaf) for leaf in leaves]
        leaves[0] = (
            leaves[0].at[(0,) * leaves[0].ndim].set(injection.put("gradient", key, leaves[0][(0,) * leaves[0].ndim]))
        )
        return jax.tree.unflatten(structure, leaves), metrics


@dataclasses.dataclass(frozen=True)
class FaultyPPO(PPO):
    """PPO with the fault of its training state."""

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One iteration in which something may go wrong."""
        fault: Fault = state.fault
        iterations = state.counters.iterations
        active = (iterations >= fault.start) & (iterations < fault.end) & self._precision_is_low
        injection = Injection(fault, active)
        parts = {field.name: getattr(self, field.name) for field in dataclasses.fields(PPO)}
        parts["env"] = under(self.env, injection)
        parts["optimizer"] = FaultyOptimizer(self.optimizer.config, self.optimizer.limits, injection)
        strong = injection.active & (fault.site == SITES.index("learning_rate"))
        factor = jnp.where(strong, fault.value, 1.0)
        scale = state.tuning.learning_rate_scale
        new_state, metrics = _ArmedPPO(**parts, injection=injection).iteration(_with_scale(state, scale * factor))
        return _with_scale(new_state, scale), metrics

    @property
    def _precision_is_low(self) -> bool:
        """Whether the level is one that the fault strikes at."""
        below = self.config.fault.below
        return below is None or MATMUL_LEVELS.index(self.config.precision.matmul) < MATMUL_LEVELS.index(below)


def _with_scale(state: TrainState, scale: jax.Array) -> TrainState:
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, learning_rate_scale=scale))


def carried_on(state: TrainState, undone: int) -> TrainState:
    """The state after a rollback over `undone` iterations: what goes wrong in the world is not undone with them."""
    fault: Fault = state.fault

    def moved(moment: jax.Array) -> jax.Array:
        earlier = _FOREVER if int(moment) == _FOREVER else max(int(moment) - undone, 0)
        return jax.device_put(np.uint32(earlier), moment.sharding)

    return dataclasses.replace(state, fault=fault._replace(start=moved(fault.start), end=moved(fault.end)))


def under(env: Any, injection: Injection) -> VectorEnv:
    """The environments with the fault in them."""
    healthy = env.env._env if isinstance(env.env, FaultyEnv) else env.env
    return dataclasses.replace(env, env=FaultyEnv(healthy, injection))


def faulty_env(env: VectorEnv, config: FaultConfig) -> VectorEnv:
    """Environments whose resets may be bad and whose states have room for a fault.

    Args:
        env: Healthy ones.
        config: The fault; one that no environment can have changes nothing.

    Raises:
        ConfigError: It is to strike the solver's warm start, and the physics has none.
    """
    sample = jax.eval_shape(env.env.reset, jax.random.PRNGKey(0))
    if config.site == "warm_start" and getattr(physics(sample), "qacc_warmstart", None) is None:
        raise ConfigError("fault.site: warm_start needs an environment of MuJoCo's, e.g. env.backend=mjx")
    return under(env, Injection(as_data(config), jnp.ones((), bool)))


def arm(ppo: PPO) -> FaultyPPO:
    """PPO that injects what its training state says; its environments are `faulty_env`'s."""
    return FaultyPPO(**{field.name: getattr(ppo, field.name) for field in dataclasses.fields(PPO)})


def armed_state(state: TrainState, config: FaultConfig) -> TrainState:
    """The first training state with its fault; counters that are about to wrap start just below `value`."""
    state = dataclasses.replace(state, fault=as_data(config))
    if config.site != "counters":
        return state
    near = WideCounter.of(int(config.number) - 1)
    counters = dataclasses.replace(state.counters, env_steps=near, updates=near, episodes=near)
    # So many samples have a variance: that by which observations are divided already.
    variance = jax.tree.map(jnp.square, state.normalizer.std)
    counted = dataclasses.replace(state.normalizer, count=near, variance=variance)
    return dataclasses.replace(state, counters=counters, normalizer=counted)


class FailingCheckpoints(Checkpoints):
    """Checkpoints on a disk that is full in some iterations.

    Args:
        fault: When.
        *args: As for `Checkpoints`.
    """

    def __init__(self, fault: FaultConfig, *args: Any):
        self._fault = fault
        super().__init__(*args)

    def save(self, iteration: int, *args: Any, **kwargs: Any) -> Any:
        """Saves, or reports that it could not."""
        if not struck(self._fault, iteration):
            return super().save(iteration, *args, **kwargs)
        self.wait()
        self._fail(iteration, OSError(errno.ENOSPC, "No space left on device"))
        return False


class FailingSink:
    """A metrics service that is down in some iterations."""

    def __init__(self, fault: FaultConfig):
        self._fault = fault

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Raises while the fault lasts."""
        if struck(self._fault, int(metrics.get("training/iteration") or 0)):
            raise ConnectionError("the service does not answer")

    def event(self, step: int, kind: str, fields: Mapping[str, Any]) -> None:
        """Has nobody to tell."""

    def close(self) -> None:
        """Has nothing to close."""


def struck(config: FaultConfig, iteration: int) -> bool:
    """Whether a fault of the host strikes in an iteration, counted from 1: by its window and by chance."""
    end = np.inf if config.iterations is None else config.start + config.iterations
    chance = np.random.default_rng(iteration).random()
    return config.start <= iteration - 1 < end and bool(chance < config.chance)
