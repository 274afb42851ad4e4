"""Faults of PPO in rollout, gradient, optimizer and training state; `arm` adds them to a healthy PPO."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlstable.config.faults import FaultConfig
from rlstable.config.supervise import MATMUL_LEVELS
from rlstable.device.counter import WideCounter
from rlstable.device.transforms import apply_if
from rlstable.device.trees import PyTree
from rlstable.faults.env import inject_into
from rlstable.faults.injection import FOREVER, SITES, Fault, Injection, as_data
from rlstable.guards.base import select
from rlstable.ppo.iteration import PPO
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Candidate, Optimizer, Rates
from rlstable.ppo.rollout import Rollout
from rlstable.ppo.state import Metrics, TrainState


class FaultyOptimizer:
    """An optimizer that computes as if parameters, moments and epsilon were float16, if the fault hits.

    This failure happened in TRELLIS: epsilon and the second moment of a small gradient underflow, and the step is
    0 / 0.
    """

    def __init__(self, optimizer: Optimizer, injection: Injection):
        self._optimizer, self._injection = optimizer, injection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def candidate(
        self, gradients: PyTree, gradient_norm: jax.Array, opt_state: PyTree, params: PyTree, rates: Rates, *more: Any
    ) -> Candidate:
        healthy = self._optimizer.candidate(gradients, gradient_norm, opt_state, params, rates, *more)
        mean, square = (_to_float16(optax.tree.get(healthy.opt_state, name)) for name in ("mu", "nu"))
        epsilon = _to_float16(jnp.float32(self._optimizer.config.optimizer.eps))
        candidate = jax.tree.map(
            lambda p, m, v: _to_float16(p) - rates.policy * m / (jnp.sqrt(v) + epsilon), params, mean, square
        )
        hit = self._injection.hits("adam", _key_of(gradient_norm))
        state = optax.tree.set(healthy.opt_state, mu=mean, nu=square)
        step = optax.global_norm(jax.tree.map(jnp.subtract, candidate, params))
        return healthy._replace(
            params=select(~hit, healthy.params, candidate),
            opt_state=select(~hit, healthy.opt_state, state),
            update_norm=jnp.where(hit, step, healthy.update_norm),
        )


def _to_float16(tree: PyTree) -> PyTree:
    """Rounds numbers to float16, with subnormal numbers as zero. XLA would remove a cast to float16 and back."""
    return jax.tree.map(lambda x: jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10), tree)


def _key_of(x: jax.Array) -> jax.Array:
    """A random key from the bits of a number that is the same on every device."""
    return jax.random.PRNGKey(jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32))


@dataclasses.dataclass(frozen=True)
class FaultyPPO(PPO):
    """PPO with the fault in its training state."""

    injection: Injection | None = None  # the fault inside an iteration; None outside
    matmul: str = "highest"  # level of the precision
    below: str | None = None

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        fault, iterations = state.fault, state.counters.iterations
        active = (iterations >= fault.start) & (iterations < fault.end) & self._precision_is_low
        injection = Injection(fault, active)
        optimizer: Any = FaultyOptimizer(self.optimizer, injection)
        env = inject_into(self.env, injection)
        armed = dataclasses.replace(self, env=env, optimizer=optimizer, injection=injection)
        strong = active & (fault.site == SITES.index("learning_rate"))
        scale = state.tuning.learning_rate_scale
        state = _with_scale(_corrupt_state(state, injection), scale * jnp.where(strong, fault.value, 1.0))
        new_state, metrics = PPO.iteration(armed, state)
        return _with_scale(new_state, scale), metrics

    @property
    def _precision_is_low(self) -> bool:
        """Whether the precision is below `fault.below`; the fault is only active at these levels."""
        return self.below is None or MATMUL_LEVELS.index(self.matmul) < MATMUL_LEVELS.index(self.below)

    def collect(self, state: TrainState, key: jax.Array) -> Rollout:
        """Collects experience, with bad standard deviations or log-probabilities if the fault hits."""
        rollout = super().collect(state, key)
        if self.injection is None:
            return rollout
        data, value = rollout.data, self.injection.fault.value
        key = jax.random.fold_in(key, 1)
        bad_std = self.injection.hits("policy_std", key, data.log_prob.shape)
        bad_log_prob = self.injection.hits("log_ratio", key, data.log_prob.shape)
        scale = jnp.where(bad_std[..., None], value, data.distribution.scale)
        log_prob = jnp.where(bad_log_prob, data.log_prob + value, data.log_prob)
        distribution = dataclasses.replace(data.distribution, scale=scale)
        # The logarithm of a negative standard deviation is NaN, as in a real policy.
        log_prob = jnp.where(bad_std, distribution.log_prob(data.raw_action), log_prob)
        return rollout._replace(data=data._replace(distribution=distribution, log_prob=log_prob))

    def gradient(self, *args: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The gradient of a minibatch and its metrics, with bad numbers if the fault hits."""
        gradients, metrics = super().gradient(*args)
        injection = self.injection
        if injection is None:
            return gradients, metrics
        value, key = injection.fault.value, _key_of(metrics["training/total_loss"])
        for name in ("training/kl_mean", "training/policy_distance"):
            if name in metrics:
                metrics[name] = injection.put("kl", key, metrics[name])
        overflow = injection.hits("loss", key)
        metrics["training/total_loss"] = jnp.where(overflow, value, metrics["training/total_loss"])
        factor = jnp.where(injection.hits("value_loss", key), value, 1.0)
        gradients = {**gradients, "value": jax.tree.map(lambda g: g * factor, gradients["value"])}
        leaves, structure = jax.tree.flatten(gradients)
        leaves = [jnp.where(overflow, value, leaf) for leaf in leaves]
        first = (0,) * leaves[0].ndim
        leaves[0] = leaves[0].at[first].set(injection.put("gradient", key, leaves[0][first]))
        return jax.tree.unflatten(structure, leaves), metrics


def _corrupt_state(state: TrainState, injection: Injection) -> TrainState:
    """The state with a scrambled critic or shifted observation statistics, if the fault hits one of them."""
    value = injection.fault.value
    key_hit, key_noise = jax.random.split(jax.random.fold_in(state.key, SITES.index("critic")))
    scrambled = injection.hits("critic", key_hit)
    critic = apply_if(scrambled, lambda params: _scramble(params, key_noise, value), state.params["value"])
    shifted = injection.hits("normalizer", key_hit)
    normalizer = apply_if(shifted, lambda statistics: _shift_statistics(statistics, value), state.normalizer)
    return dataclasses.replace(state, params={**state.params, "value": critic}, normalizer=normalizer)


def _scramble(params: PyTree, key: jax.Array, factor: jax.Array) -> PyTree:
    """Replaces parameters by normal random numbers, with the root mean square of each array times a factor."""
    leaves, structure = jax.tree.flatten(params)

    def scramble(x: jax.Array, key: jax.Array) -> jax.Array:
        size = factor * jnp.sqrt(jnp.mean(jnp.square(x)))
        return size.astype(x.dtype) * jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.unflatten(structure, map(scramble, leaves, jax.random.split(key, len(leaves))))


def _shift_statistics(statistics: Statistics, value: jax.Array) -> Statistics:
    """Statistics after a burst of rare observations: mean moved by `value` standard deviations, which grow as much."""
    mean = jax.tree.map(lambda x, std: x + value * std, statistics.mean, statistics.std)
    variance = jax.tree.map(lambda x: x * jnp.square(value), statistics.variance)
    return dataclasses.replace(
        statistics, mean=mean, variance=variance, std=jax.tree.map(lambda x: x * value, statistics.std)
    )


def _with_scale(state: TrainState, scale: jax.Array) -> TrainState:
    return dataclasses.replace(state, tuning=dataclasses.replace(state.tuning, learning_rate_scale=scale))


def after_rollback(state: TrainState, undone: int) -> TrainState:
    """The state after a rollback over `undone` iterations, with the window of the fault moved by as many.

    Injected faults are part of the environment, so a rollback does not undo them.
    """
    fault: Fault = state.fault

    def earlier(iteration: jax.Array) -> jax.Array:
        number = FOREVER if int(iteration) == FOREVER else max(int(iteration) - undone, 0)
        return jax.device_put(np.uint32(number), iteration.sharding)

    return dataclasses.replace(state, fault=fault._replace(start=earlier(fault.start), end=earlier(fault.end)))


def arm(ppo: PPO, matmul: str, config: FaultConfig) -> PPO:
    """PPO that injects the fault in its training state; its environments must come from `faulty_env`."""
    if config.site is None:
        return ppo
    own = {field.name: getattr(ppo, field.name) for field in dataclasses.fields(PPO)}
    return FaultyPPO(**own, matmul=matmul, below=config.below)


def armed_state(state: TrainState, config: FaultConfig) -> TrainState:
    """The first training state with a fault; for the site `counters`, counters start just below the fault's value."""
    if config.site is None:
        return state
    state = dataclasses.replace(state, fault=as_data(config))
    if config.site != "counters" or not config.can_occur:
        return state
    near = WideCounter.of(int(config.number) - 1)
    counters = dataclasses.replace(state.counters, env_steps=near, updates=near, episodes=near)
    # With a count above 0 the variance must agree with the standard deviation.
    variance = jax.tree.map(jnp.square, state.normalizer.std)
    counted = dataclasses.replace(state.normalizer, count=near, variance=variance)
    return dataclasses.replace(state, counters=counters, normalizer=counted)
