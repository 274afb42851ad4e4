"""The gradient of the loss on a minibatch, with gradient accumulation, and value targets of a whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.trees import Observation, PyTree
from rlstable.guards import masked
from rlstable.ppo.diagnostics import loss_metrics
from rlstable.ppo.loss import Loss, LossTerms
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected, Minibatch, Targets, swap_axes
from rlstable.ppo.state import Tuning

_Gradient = tuple[Params, dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class LossGradient:
    """Differentiates the loss.

    Attributes:
        scaled: Whether the loss is scaled during differentiation, which float16 networks need.
        tightens: Whether the clipping of ratio and value is multiplied by `Tuning.clip_scale`.
    """

    loss: Loss
    scaled: bool
    tightens: bool

    def gradient(
        self,
        params: Params,
        statistics: Statistics,
        minibatch: Minibatch,
        valid_share: jax.Array | None,
        tuning: Tuning,
    ) -> _Gradient:
        """The gradient of the loss on a minibatch `[T, B]` over all devices, and metrics of the loss.

        With `ppo.gradient_accumulation` the gradient is computed in parts. Targets, advantage normalisation, mask and
        noise cover the whole minibatch, so the result is mathematically the same.
        """

        def objective(params: Params, minibatch: Minibatch) -> tuple[jax.Array, LossTerms]:
            clip_scale = tuning.clip_scale if self.tightens else None
            terms = self.loss.terms(params, statistics, minibatch, valid_share, clip_scale)
            return (terms.loss * tuning.loss_scale if self.scaled else terms.loss), terms

        def differentiate(params: Params, minibatch: Minibatch) -> _Gradient:
            gradients, terms = jax.grad(objective, has_aux=True)(params, minibatch)
            return gradients, loss_metrics(terms, minibatch, valid_share, self.loss.limits)

        parts, targets, valid = self.loss.config.gradient_accumulation, minibatch.targets, minibatch.collected.valid
        if parts > 1 and targets is None:
            observation = minibatch.collected.observation
            values = estimate_values(self.loss.networks, params, statistics, observation, parts)
            targets = self.loss.estimate(params, statistics, minibatch.collected, values)
        if targets is not None:
            targets, std = self.loss.standardized(targets, valid, valid_share)
            # One number, broadcast to every sample so that gradient accumulation can split it with the samples.
            std = None if std is None else jnp.broadcast_to(std, targets.advantage.shape)
            minibatch = minibatch._replace(targets=targets, advantage_std=std)
        if parts == 1:
            gradients, metrics = differentiate(params, minibatch)
        else:
            gradients, metrics = _accumulate(differentiate, params, minibatch, parts)
        gradients, metrics = sharding.mean((gradients, metrics))
        if self.scaled:
            gradients = jax.tree.map(lambda g: g / tuning.loss_scale, gradients)
        return gradients, metrics

    def targets(self, params: Params, statistics: Statistics, data: Collected) -> Targets:
        """Value targets and advantages of the whole batch, `[rows, T]`, all from the same parameters.

        The unrolls of an environment follow each other, so they are one sequence: an advantage takes rewards of later
        unrolls into account. Brax, and `ppo.gae=per_update`, bootstrap at the end of every unroll.
        """
        config = self.loss.config
        unrolls = config.rows // config.num_envs
        length, envs = data.reward.shape[1], data.reward.shape[0] // unrolls

        def sequences(x: jax.Array) -> jax.Array:  # `[rows, T]` to `[unrolls * T, envs]`
            return jnp.swapaxes(x.reshape(unrolls, envs, length), 1, 2).reshape(-1, envs)

        def rows(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x.reshape(unrolls, length, envs), 1, 2).reshape(-1, length)

        networks, observation = self.loss.networks, swap_axes(data.observation)
        values = estimate_values(networks, params, statistics, observation, parts_of_batch(config))
        joined = data._replace(
            reward=sequences(data.reward),
            truncation=sequences(data.truncation),
            termination=sequences(data.termination),
            bootstrap_observation=swap_axes(jax.tree.map(lambda x: x[-envs:], data.bootstrap_observation)),
        )
        targets = self.loss.estimate(params, statistics, joined, sequences(swap_axes(values)))
        return Targets(*map(rows, targets))

    def expected_rewards(self, params: Params, statistics: Statistics, data: Collected) -> jax.Array:
        """Rewards that the value network expects, `[rows, T]`: value minus discounted next value."""
        networks, observation = self.loss.networks, swap_axes(data.observation)
        values = estimate_values(networks, params, statistics, observation, parts_of_batch(self.loss.config))
        last = self.loss.networks.value(params, statistics, swap_axes(data.bootstrap_observation))
        values = self.loss.counted(values, swap_axes(data.truncation))
        following = swap_axes(jnp.concatenate([values[1:], last], axis=0))
        return swap_axes(values) - self.loss.config.discounting * (1.0 - data.termination) * following


def parts_of_batch(ppo: PPOConfig) -> int:
    """Parts of a whole batch for `estimate_values`: with gradient accumulation one must need no more than SGD."""
    return 1 if ppo.gradient_accumulation == 1 else ppo.gradient_accumulation * ppo.num_minibatches


def estimate_values(
    networks: Networks, params: Params, statistics: Statistics, observation: Observation, parts: int
) -> jax.Array:
    """Value estimates `[T, B]`, computed in parts."""

    def value(observation: Observation) -> jax.Array:
        return networks.value(params, statistics, observation)

    if parts == 1:
        return value(observation)
    values = jax.lax.map(value, _split(observation, parts))
    return jnp.moveaxis(values, 0, 1).reshape(values.shape[1], -1)


def preprocess_batch(networks: Networks, statistics: Statistics, data: Collected) -> Collected:
    """Normalises and clips observations once for all epochs, for `Networks.without_preprocessing`.

    Finite observations of invalid samples are kept: the value target of the previous step may depend on them.
    """
    return data._replace(
        observation=networks.preprocess(statistics, masked.zero_invalid_nonfinite(data.observation, data.valid)),
        bootstrap_observation=networks.preprocess(statistics, data.bootstrap_observation),
    )


def _accumulate(
    differentiate: Callable[[Params, Minibatch], _Gradient], params: Params, minibatch: Minibatch, parts: int
) -> _Gradient:
    """Mean gradient and metrics over equal parts of a minibatch, with one part in memory at a time."""
    split = _split(minibatch, parts)

    def add(total: _Gradient, part: Minibatch) -> tuple[_Gradient, None]:
        return jax.tree.map(lambda a, b: a + b / parts, total, differentiate(params, part)), None

    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, params, first))
    return jax.lax.scan(add, zeros, split)[0]


def _split(samples: PyTree, parts: int) -> PyTree:
    """Splits `[T, B]` samples into equal parts, `[parts, T, B / parts]`."""
    return jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0], parts, x.shape[1] // parts, *x.shape[2:]), 1, 0), samples
    )
