"""The gradient of the loss on a minibatch, whole or in parts, and the estimates that it rests on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.rarely import apply_if
from rlstable.guards import limiters, masked
from rlstable.ppo import normalizer
from rlstable.ppo.loss import estimate, ppo_loss, standardize
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.state import Transition, Tuning

# Weight of an iteration's value targets in their statistics: targets grow with the policy, so old ones must fade.
_VALUE_RATE = 0.1


@dataclasses.dataclass(frozen=True)
class LossGradient:
    """What is minimised.

    Attributes:
        networks: Policy and value networks that take observations as they are (`Networks.bare`).
        config: Hyperparameters.
        limits: Bounds.
        scaled: Whether the loss is multiplied while it is differentiated, as float16 networks need.
        tightens: Whether the clipping of ratio and value follows `Tuning.clip_scale`.
    """

    networks: Networks
    config: PPOConfig
    limits: LimiterConfig
    scaled: bool
    tightens: bool

    def gradient(
        self,
        params: Any,
        statistics: Statistics,
        data: Transition,
        valid_share: jax.Array | None,
        tuning: Tuning,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The gradient of the loss on a minibatch over all devices, and its metrics.

        With `ppo.gradient_accumulation` the minibatch is taken in parts; targets, normalisation, mask and noise span
        the whole of it, so that the mathematics is the same.

        Args:
            params: Network parameters.
            statistics: Observation statistics.
            data: `[T, B]`, prepared.
            valid_share: `masked.share(data.valid)`.
            tuning: Its loss scale is a factor on the loss while it is differentiated; the gradient is divided by it.
        """

        def objective(params: Any, data: Transition) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, metrics = ppo_loss(
                params,
                statistics,
                data,
                valid_share,
                networks=self.networks,
                config=self.config,
                limits=self.limits,
                clip_scale=tuning.clip_scale if self.tightens else None,
            )
            return (loss * tuning.loss_scale if self.scaled else loss), metrics

        differentiate = jax.grad(objective, has_aux=True)
        if self.config.gae == "per_iteration" and self.config.normalize_advantage:
            data = self._standardized(data, valid_share)
        if self.config.gradient_accumulation == 1:
            gradients, metrics = differentiate(params, data)
        else:
            gradients, metrics = self._accumulate(differentiate, params, statistics, data, valid_share)
        gradients, metrics = sharding.mean((gradients, metrics))
        if self.scaled:
            gradients = jax.tree.map(lambda g: g / tuning.loss_scale, gradients)
        return gradients, metrics

    def with_estimates(self, params: Any, statistics: Statistics, data: Transition) -> Transition:
        """Targets and advantages for the whole batch `[rows, T]`, from one value function."""
        unrolls = self._estimated(params, statistics, _time_first(data), self.parts_of_batch)
        return data._replace(target=jnp.swapaxes(unrolls.target, 0, 1), advantage=jnp.swapaxes(unrolls.advantage, 0, 1))

    def follow_targets(self, params: Any, statistics: Statistics, data: Transition) -> tuple[Statistics, Any]:
        """Takes the batch's value targets into their statistics; value estimates stay what they were.

        Args:
            params: Network parameters at the end of the iteration.
            statistics: Observation statistics, with those of value targets.
            data: `[rows, T]`.

        Returns:
            New statistics, and the parameters that give the same values under them.
        """
        old: Any = statistics.value
        new = self._value_statistics(params, statistics, data)
        return dataclasses.replace(statistics, value=new), self.networks.rescale_value(params, old, new)

    def first_targets(self, params: Any, statistics: Statistics, data: Transition) -> Statistics:
        """The statistics with those of the first batch's value targets; later ones are left to `follow_targets`.

        Before the first batch the unit of values is 1, whatever the task pays. The critic would spend its first
        iteration on numbers of another magnitude, and its gradient would drown that of the policy.

        Args:
            params: Network parameters at the start of the iteration.
            statistics: Observation statistics, with those of value targets.
            data: `[rows, T]`.
        """
        value: Any = statistics.value

        def first(_: Statistics) -> Statistics:
            found = self._value_statistics(params, statistics, data)
            return dataclasses.replace(found, count=value.count)  # the batch is counted when the iteration ends

        return dataclasses.replace(statistics, value=apply_if(value.count == 0, first, value))

    def _value_statistics(self, params: Any, statistics: Statistics, data: Transition) -> Statistics:
        targets = limiters.clip(self.with_estimates(params, statistics, data).target, self.limits.value_target)
        value: Any = statistics.value
        return normalizer.update(value, targets, data.valid, self.config, least_rate=_VALUE_RATE)

    def _accumulate(
        self,
        differentiate: Any,
        params: Any,
        statistics: Statistics,
        data: Transition,
        valid_share: jax.Array | None,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The mean of the gradients of equal parts of a minibatch, one part in memory at a time."""
        parts = self.config.gradient_accumulation
        if data.target is None:
            data = self._estimated(params, statistics, data, parts)
            if self.config.normalize_advantage:
                data = self._standardized(data, valid_share)
        split = _in_parts(data, parts)

        def add(total: Any, part: Transition) -> tuple[Any, None]:
            return jax.tree.map(lambda a, b: a + b / parts, total, differentiate(params, part)), None

        first = jax.tree.map(lambda x: x[0], split)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, params, first))
        return jax.lax.scan(add, zeros, split)[0]

    @property
    def parts_of_batch(self) -> int:
        """In how many parts the whole batch is looked at, where minibatches are taken in parts to save memory."""
        parts = self.config.gradient_accumulation
        return 1 if parts == 1 else parts * self.config.num_minibatches

    def _estimated(self, params: Any, statistics: Statistics, data: Transition, parts: int) -> Transition:
        def estimated(part: Transition) -> tuple[jax.Array, jax.Array]:
            values = self.networks.value(params, statistics, part.observation)
            return estimate(self.networks, params, statistics, part, values, self.config)

        if parts == 1:
            target, advantage = estimated(data)
        else:
            target, advantage = jax.tree.map(_joined, jax.lax.map(estimated, _in_parts(data, parts)))
        return data._replace(target=target, advantage=advantage)

    def _standardized(self, data: Transition, valid_share: jax.Array | None) -> Transition:
        least = self.limits.advantage_std_min
        advantage, std = standardize(data.advantage, data.valid, valid_share, least)
        # One number for the whole minibatch, shaped as its samples so that it can be split with them.
        return data._replace(advantage=advantage, advantage_std=jnp.broadcast_to(std, advantage.shape))


def prepared(networks: Networks, statistics: Statistics, data: Transition) -> Transition:
    """Experience as `networks.bare` read it: observations normalised and bounded, once for all epochs.

    The observation of an invalid sample is kept where it is finite: the value of the step before may rest on it.

    Args:
        networks: What prepares.
        statistics: Observation statistics.
        data: Any leading axes.
    """
    return data._replace(
        observation=networks.prepare(statistics, masked.finite(data.observation, data.valid)),
        bootstrap_observation=networks.prepare(statistics, data.bootstrap_observation),
    )


def as_minibatch(data: Transition, key: jax.Array) -> Transition:
    """Rows as the loss takes them, `[T, B]`, with the entropy estimate's noise."""
    data = _time_first(data)
    return data._replace(noise=jax.random.normal(key, data.raw_action.shape))


def _time_first(data: Transition) -> Transition:
    """`[rows, T, ...]` to `[T, rows, ...]`, the bootstrap observation as it is."""
    swapped = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data._replace(bootstrap_observation=None))
    return swapped._replace(bootstrap_observation=data.bootstrap_observation)


def _in_parts(data: Transition, parts: int) -> Transition:
    """Equal parts of `[T, B]` data, `[parts, T, B / parts]`."""
    split = jax.tree.map(lambda x: _split(x, parts, axis=1), data._replace(bootstrap_observation=None))
    after = jax.tree.map(lambda x: _split(x, parts, axis=0), data.bootstrap_observation)
    return split._replace(bootstrap_observation=after)


def _joined(x: jax.Array) -> jax.Array:
    """`[parts, T, B / parts]` to `[T, B]`."""
    return jnp.reshape(jnp.moveaxis(x, 0, 1), (x.shape[1], -1))


def _split(x: jax.Array, parts: int, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(x, shape), axis, 0)
