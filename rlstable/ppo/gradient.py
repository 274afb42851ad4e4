"""The gradient of the loss on a minibatch, with gradient accumulation, and value targets of a whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.guards import masked
from rlstable.ppo.diagnostics import loss_metrics
from rlstable.ppo.loss import LossTerms, estimate, ppo_loss, standardize
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected, Minibatch, Targets, map_samples, time_first
from rlstable.ppo.state import Tuning


@dataclasses.dataclass(frozen=True)
class LossGradient:
    """Differentiates the loss.

    Attributes:
        networks: Policy and value networks without preprocessing (`Networks.without_preprocessing`).
        config: Hyperparameters.
        limits: Bounds of the limiters.
        scaled: Whether the loss is scaled during differentiation, which float16 networks need.
        tightens: Whether the clipping of ratio and value is multiplied by `Tuning.clip_scale`.
    """

    networks: Networks
    config: PPOConfig
    limits: LimiterConfig
    scaled: bool
    tightens: bool

    def gradient(
        self,
        params: Params,
        statistics: Statistics,
        minibatch: Minibatch,
        valid_share: jax.Array | None,
        tuning: Tuning,
    ) -> tuple[Params, dict[str, jax.Array]]:
        """The gradient of the loss on a minibatch over all devices, and metrics of the loss.

        With `ppo.gradient_accumulation` the gradient is computed in parts. Targets, advantage normalisation, mask and
        noise cover the whole minibatch, so the result is mathematically the same.

        Args:
            params: Network parameters.
            statistics: Observation statistics.
            minibatch: Preprocessed minibatch, `[T, B]`.
            valid_share: `masked.share` of the minibatch.
            tuning: Holds the loss scale and the clip scale.
        """

        def objective(params: Params, minibatch: Minibatch) -> tuple[jax.Array, LossTerms]:
            loss, terms = ppo_loss(
                params,
                statistics,
                minibatch,
                valid_share,
                networks=self.networks,
                config=self.config,
                limits=self.limits,
                clip_scale=tuning.clip_scale if self.tightens else None,
            )
            return (loss * tuning.loss_scale if self.scaled else loss), terms

        def differentiate(params: Params, minibatch: Minibatch) -> tuple[Params, dict[str, jax.Array]]:
            gradients, terms = jax.grad(objective, has_aux=True)(params, minibatch)
            return gradients, loss_metrics(terms, minibatch, valid_share, self.limits)

        parts = self.config.gradient_accumulation
        if parts > 1 and minibatch.targets is None:
            minibatch = minibatch._replace(targets=self._estimate(params, statistics, minibatch.collected, parts))
        if minibatch.targets is not None and self.config.normalize_advantage:
            minibatch = self._standardize(minibatch, minibatch.targets, valid_share)
        if parts == 1:
            gradients, metrics = differentiate(params, minibatch)
        else:
            gradients, metrics = _accumulate(differentiate, params, minibatch, parts)
        gradients, metrics = sharding.mean((gradients, metrics))
        if self.scaled:
            gradients = jax.tree.map(lambda g: g / tuning.loss_scale, gradients)
        return gradients, metrics

    def targets(self, params: Params, statistics: Statistics, data: Collected) -> Targets:
        """Value targets and advantages of the whole batch, `[rows, T]`, all from the same parameters."""
        # With gradient accumulation the whole batch must not need more memory than one part of a minibatch.
        parts = self.config.gradient_accumulation
        parts = 1 if parts == 1 else parts * self.config.num_minibatches
        targets = self._estimate(params, statistics, time_first(data), parts)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), targets)

    def _estimate(self, params: Params, statistics: Statistics, data: Collected, parts: int) -> Targets:
        def estimate_part(part: Collected) -> Targets:
            values = self.networks.value(params, statistics, part.observation)
            return estimate(self.networks, params, statistics, part, values, self.config)

        if parts == 1:
            return estimate_part(data)
        return jax.tree.map(_join, jax.lax.map(estimate_part, _split_samples(data, parts)))

    def _standardize(self, minibatch: Minibatch, targets: Targets, valid_share: jax.Array | None) -> Minibatch:
        valid, min_std = minibatch.collected.valid, self.limits.advantage_std_min
        advantage, std = standardize(targets.advantage, valid, valid_share, min_std)
        # One number, broadcast to every sample so that gradient accumulation can split it with the samples.
        advantage_std = jnp.broadcast_to(std, advantage.shape)
        return minibatch._replace(targets=targets._replace(advantage=advantage), advantage_std=advantage_std)


def preprocess_batch(networks: Networks, statistics: Statistics, data: Collected) -> Collected:
    """Normalises and clips observations once for all epochs, for `Networks.without_preprocessing`.

    Finite observations of invalid samples are kept: the value target of the previous step may depend on them.

    Args:
        networks: Networks with preprocessing.
        statistics: Observation statistics.
        data: Experience with any leading axes.
    """
    return data._replace(
        observation=networks.preprocess(statistics, masked.zero_invalid_nonfinite(data.observation, data.valid)),
        bootstrap_observation=networks.preprocess(statistics, data.bootstrap_observation),
    )


def _accumulate(
    differentiate: Callable[..., tuple[Params, dict[str, jax.Array]]], params: Params, minibatch: Minibatch, parts: int
) -> tuple[Params, dict[str, jax.Array]]:
    """Mean gradient and metrics over equal parts of a minibatch, with one part in memory at a time."""
    rest = jax.tree.map(lambda x: _split(x, parts, axis=1), tuple(minibatch)[1:])
    split = Minibatch(_split_samples(minibatch.collected, parts), *rest)

    def add(total: Any, part: Minibatch) -> tuple[Any, None]:
        return jax.tree.map(lambda a, b: a + b / parts, total, differentiate(params, part)), None

    first = jax.tree.map(lambda x: x[0], split)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, params, first))
    return jax.lax.scan(add, zeros, split)[0]


def _split_samples(data: Collected, parts: int) -> Collected:
    """Splits `[T, B]` data into equal parts, `[parts, T, B / parts]`."""
    return map_samples(lambda x: _split(x, parts, axis=1), data, bootstrap=lambda x: _split(x, parts, axis=0))


def _join(x: jax.Array) -> jax.Array:
    """`[parts, T, B / parts]` to `[T, B]`."""
    return jnp.reshape(jnp.moveaxis(x, 0, 1), (x.shape[1], -1))


def _split(x: jax.Array, parts: int, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(x, shape), axis, 0)
