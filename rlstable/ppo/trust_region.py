"""Trust region: bounds the distance that one iteration moves the policy, by SGD and by the normaliser together.

The distance compares the policy that collected the batch with the policy that will collect the next batch. It compares
the actions that the environment receives (`distance`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.transforms import apply_if
from rlstable.device.trees import PyTree
from rlstable.guards import masked
from rlstable.guards.base import select
from rlstable.ppo import kl_limiter, normalizer
from rlstable.ppo.distance import ActionMoments, distance, moments, sample_cap
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.records import Collected
from rlstable.ppo.sgd import SGD, SGDCarry, SGDState
from rlstable.ppo.state import TrainState

_SAMPLES = 1024  # per device, for the distance over a whole iteration
_HALVINGS = 6
# Nats that the normaliser alone may move the policy in one iteration; SGD moves the policy by about 0.04.
_NORMALIZER_LIMIT = 0.1
_NORMALIZER_SHARE = 0.5  # of the policy's limit, if that is smaller than `_NORMALIZER_LIMIT`


class Shift(NamedTuple):
    """Distance between two policies over a batch, float32 scalars in nats, the same on every device.

    Attributes:
        mean: Mean over the valid samples.
        p99: 99th percentile of the valid samples, 0 without any. With several devices the mean of their percentiles.
    """

    mean: jax.Array
    p99: jax.Array


@dataclasses.dataclass(frozen=True)
class TrustRegion:
    """The bound on the policy's distance over a whole iteration.

    Attributes:
        config: The whole configuration.
        networks: Networks for raw observations.
        optimizer: Optimizer, for the factor of remedies on the policy's rate.
    """

    config: Config
    networks: Networks
    optimizer: Optimizer

    @property
    def needs_distance(self) -> bool:
        """Whether a limiter or a guard needs the distance."""
        return self.config.guards.limiters.kl is not None or self.config.guards.policy.enabled

    def reference(self, state: TrainState, statistics: Statistics, data: Collected) -> ActionMoments:
        """Action moments of the collecting policy, the reference of the distance.

        The first batch was collected with empty observation statistics, and the policy has learned nothing that could
        be lost. So for the first batch the reference is the policy with the new statistics.
        """
        reference = moments(data.distribution)
        if self.config.ppo.normalize_observations and statistics is not state.normalizer:

            def with_new_statistics(_: ActionMoments) -> ActionMoments:
                return self._moments(state.params, statistics, data)

            reference = apply_if(state.normalizer.count == 0, with_new_statistics, reference)
        return reference

    def update_statistics(
        self, state: TrainState, params: Params, data: Collected, collecting: bool = False
    ) -> Statistics:
        """Updates the observation statistics with a batch, as far as the bound on the distance allows.

        Args:
            state: Training state before the batch, with the old statistics.
            params: Network parameters to measure the distance with.
            data: The batch.
            collecting: Whether these parameters and the old statistics collected the batch.
        """
        statistics, limit = state.normalizer, kl_limiter.limit(self.config, state.tuning)
        outlier = self.config.guards.limiters.observation_outlier
        new = normalizer.update(statistics, data.observation, data.valid, self.config.ppo, outlier)
        if self.optimizer.separate_rates:
            # If the policy is held or slowed, SGD cannot correct the policy after the normaliser has moved it.
            pace = self.optimizer.policy_pace(state.tuning)
            slower = normalizer.blend(statistics, new, pace, self.config.ppo)
            new = select((pace >= 1.0) | (statistics.count == 0), new, slower)
        if limit is None:
            return new
        sample = subsample(data, data.log_prob.shape)
        before = moments(sample.distribution) if collecting else self._moments(params, statistics, sample)
        return bounded_update(self.networks, params, statistics, new, sample, before, limit, self.config.ppo)

    def enforce(
        self,
        sgd: SGD,
        state: TrainState,
        statistics: Statistics,
        data: Collected,
        reference: ActionMoments | None,
        sgd_result: SGDCarry,
    ) -> tuple[SGDCarry, Statistics, Shift | None]:
        """Measures how far the iteration moved the policy, and undoes the iteration beyond the KL limiter's bound.

        Statistics that were updated after SGD were bounded for SGD's parameters, so both are undone together.

        Args:
            sgd: SGD of this iteration.
            state: Training state before the iteration.
            statistics: Observation statistics after the batch.
            data: The batch.
            reference: Result of `reference`; None if the distance is not measured.
            sgd_result: Result of SGD.

        Returns:
            The SGD result and the statistics, both undone after an overshoot, and the distance (None if not measured).
        """
        if reference is None:
            return sgd_result, statistics, None
        sample, reference = subsample((data, reference), data.log_prob.shape)
        before = statistics
        if self.config.ppo.normalize_observations and not self.config.ppo.updates_normalizer_first:
            reference = self.reference(state, statistics, sample)
            before = select(state.normalizer.count == 0, statistics, state.normalizer)
        configured_limit = self.config.guards.limiters.kl

        def measure(progress: SGDState, statistics: Statistics) -> Shift:
            return shift(self.networks, sgd.params(progress), statistics, sample, reference, configured_limit)

        measured = measure(sgd_result.progress, statistics)
        limit = kl_limiter.limit(self.config, sgd_result.tuning)
        if sgd_result.skipped is None or limit is None:
            return sgd_result, statistics, measured
        minibatches = state.tuning.epochs * self.config.ppo.num_minibatches
        overshot, skipped, tuning = kl_limiter.check_iteration(
            sgd_result.skipped, measured.mean, sgd_result.tuning, limit, minibatches
        )
        start = sgd.start(state)
        start = start._replace(sums=jax.tree.map(jnp.zeros_like, sgd_result.progress.sums))
        (progress, statistics), _, measured = apply_if(
            overshot,
            lambda operand: (operand[1], operand[1], measure(*operand[1])),
            ((sgd_result.progress, statistics), (start, before), measured),
        )
        return sgd_result._replace(progress=progress, skipped=skipped, tuning=tuning), statistics, measured

    def metrics(
        self, state: TrainState, statistics: Statistics, data: Collected, shift: Shift | None
    ) -> dict[str, jax.Array]:
        """Metrics of the distance; `statistics` and `shift` are results of `enforce`."""
        metrics: dict[str, jax.Array] = {}
        if shift is not None:
            metrics |= {"training/policy_distance": shift.mean, "training/policy_distance_p99": shift.p99}
        if self.config.guards.limiters.kl is not None and self.config.ppo.normalize_observations:
            metrics["limiters/normalizer/active"] = normalizer.skipped_share(
                state.normalizer, statistics, data.reward, data.valid
            )
        return metrics

    def _moments(self, params: Params, statistics: Statistics, data: Collected) -> ActionMoments:
        observation = masked.zero_invalid_nonfinite(data.observation, data.valid)
        return moments(self.networks.distribution(params, statistics, observation)[0])


def subsample(tree: PyTree, shape: tuple[int, ...]) -> PyTree:
    """Takes every n-th unroll, about `_SAMPLES` steps in total: enough for a mean, at a fraction of the cost.

    Args:
        tree: Arrays `[rows, ...]`.
        shape: `(rows, T)` of the batch.
    """
    rows, steps = shape
    stride = max(1, rows * steps // _SAMPLES)
    return jax.tree.map(lambda x: x[:: min(stride, rows)], tree)


def shift(
    networks: Networks,
    params: Params,
    statistics: Statistics,
    data: Collected,
    reference: ActionMoments,
    limit: jax.Array | float | None,
) -> Shift:
    """Distance from a reference policy to the policy with these parameters and statistics.

    Args:
        networks: Networks for raw observations.
        params: Network parameters.
        statistics: Observation statistics.
        data: Experience `[rows, T]`; only observations and mask are read.
        reference: Action moments of the reference policy on the same samples.
        limit: Largest mean distance in nats, which sets the cap per sample; None for no limit.
    """
    observation = masked.zero_invalid_nonfinite(data.observation, data.valid)
    current = moments(networks.distribution(params, statistics, observation)[0])
    moved = distance(reference, current)
    mean = masked.mean(jnp.minimum(moved, sample_cap(limit)), data.valid, masked.share(data.valid))
    return Shift(sharding.mean(mean), sharding.mean(percentile_99(moved, data.valid)))


def percentile_99(x: jax.Array, valid: masked.Mask) -> jax.Array:
    """The 99th percentile of valid numbers as in `jnp.quantile`; 0 without any, NaN if one is NaN.

    Sorts only the largest hundredth: a sort of all numbers takes as long as a forward pass of a small policy.
    """
    used = jnp.ones(x.shape, bool) if valid is None else valid
    position = 0.01 * (jnp.maximum(jnp.sum(used), 1) - 1)  # from the largest number
    largest = jax.lax.top_k(jnp.where(used, x, -jnp.inf).ravel(), math.ceil(0.01 * (x.size - 1)) + 1)[0]
    below = jnp.floor(position).astype(jnp.int32)
    upper, lower = largest[below], largest[jnp.minimum(below + 1, largest.size - 1)]
    share = position - below
    percentile = jnp.where(share > 0, upper * (1.0 - share) + lower * share, upper)
    percentile = jnp.where(jnp.any(used), percentile, 0.0)
    return jnp.where(jnp.any(used & jnp.isnan(x)), jnp.nan, percentile)


def bounded_update(
    networks: Networks,
    params: Params,
    old: Statistics,
    new: Statistics,
    data: Collected,
    reference: ActionMoments,
    limit: jax.Array | float,
    config: PPOConfig,
) -> Statistics:
    """The new statistics, or a blend of old and new statistics that moves the policy less.

    Backtracking: the update is halved until the distance is within the limit, and dropped after `_HALVINGS` halvings.
    The first batch is applied in full, because the policy has learned nothing that could be lost.

    Args:
        networks: Networks for raw observations.
        params: Network parameters.
        old: Observation statistics before the batch.
        new: Observation statistics after the batch.
        data: Experience `[rows, T]`; only observations and mask are read.
        reference: Action moments of the policy with `old` on the same samples.
        limit: Largest mean distance of the policy in nats; the normaliser may use a part of it.
        config: Holds the epsilon of the standard deviation.
    """
    first = old.count == 0
    normalizer_limit = jnp.minimum(_NORMALIZER_SHARE * limit, _NORMALIZER_LIMIT)

    def moved(statistics: Statistics) -> jax.Array:
        return jnp.where(first, 0.0, shift(networks, params, statistics, data, reference, limit).mean)

    def halve(carry: tuple[Statistics, jax.Array, jax.Array]) -> tuple[Statistics, jax.Array, jax.Array]:
        share = 0.5 * carry[1]
        share = jnp.where(share < 0.5**_HALVINGS, 0.0, share)
        statistics = normalizer.blend(old, new, share, config)
        return statistics, share, moved(statistics)

    def too_far(carry: tuple[Statistics, jax.Array, jax.Array]) -> jax.Array:
        return ~(carry[2] <= normalizer_limit) & (carry[1] > 0.0)

    return jax.lax.while_loop(too_far, halve, (new, jnp.ones(()), moved(new)))[0]
