"""Trust region: bounds how far one iteration moves the policy, by SGD and by the normaliser together.

The distance is measured from the policy that collected the batch to the policy that will collect the next batch, in
what the environment sees (`distance`).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.device.transforms import apply_if
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

_SAMPLES = 1024  # of a batch and device that the end of an iteration is measured on
_HALVINGS = 6
_NORMALIZER_LIMIT = 0.1  # nats that the normaliser alone may move a policy in an iteration; learning moves it by 0.04
_NORMALIZER_SHARE = 0.5  # of the policy's limit, where that is tighter


class Shift(NamedTuple):
    """Distance between two policies over a batch, float32 scalars in nats, the same on every device.

    Attributes:
        mean: Over the valid samples.
        p99: 99th percentile of the valid samples, 0 without any; with several devices the mean of their percentiles.
    """

    mean: jax.Array
    p99: jax.Array


@dataclasses.dataclass(frozen=True)
class TrustRegion:
    """The bound on the policy's distance over a whole iteration.

    Attributes:
        config: The whole configuration.
        networks: The policy's, for observations as they were collected.
        optimizer: For the pace that remedies leave to the policy.
    """

    config: Config
    networks: Networks
    optimizer: Optimizer

    @property
    def needs_distance(self) -> bool:
        """Whether a limiter or a guard needs the distance."""
        return self.config.guards.limiters.kl is not None or self.config.guards.policy.enabled

    def reference(self, state: TrainState, statistics: Statistics, data: Collected) -> ActionMoments:
        """Action moments of the collecting policy, from which the distance is measured.

        The first batch was collected before the statistics knew anything. Nothing is learnt yet that could be harmed,
        so there the reference is the policy under the new statistics.
        """
        reference = moments(data.distribution)
        if self.config.ppo.normalize_observations and statistics is not state.normalizer:

            def under_new(_: Any) -> ActionMoments:
                return self._moments(state.params, statistics, data)

            reference = apply_if(state.normalizer.count == 0, under_new, reference)
        return reference

    def update_statistics(
        self, state: TrainState, params: Params, data: Collected, collecting: bool = False
    ) -> Statistics:
        """The statistics after a batch, as near to the full update as the bound on the distance allows.

        Args:
            state: With the statistics before.
            params: Of the policy.
            data: The batch.
            collecting: Whether the batch was collected with these parameters and statistics.
        """
        statistics, limit = state.normalizer, kl_limiter.limit(self.config, state.tuning)
        outlier = self.config.guards.limiters.observation_outlier
        new = normalizer.update(statistics, data.observation, data.valid, self.config.ppo, outlier)
        if self.optimizer.separate_rates:
            # If the policy is held or slowed, SGD cannot undo what the normaliser's step does to the policy.
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
        """Measures how far the iteration moved the policy, and takes back what is beyond the KL limiter's bound.

        Statistics that were updated after SGD fit the parameters that SGD left, so both are taken back together.

        Args:
            sgd: That sgd_result.
            state: Before the iteration.
            statistics: After the batch.
            data: The batch.
            reference: As `reference` returns it; None if the distance is not measured.
            sgd_result: What SGD left.
        """
        if reference is None:
            return sgd_result, statistics, None
        sample, reference = subsample((data, reference), data.log_prob.shape)
        before = statistics
        if self.config.ppo.normalize_observations and not self.config.ppo.updates_normalizer_first:
            reference = self.reference(state, statistics, sample)
            before = select(state.normalizer.count == 0, statistics, state.normalizer)
        greatest = self.config.guards.limiters.kl

        def moved(progress: SGDState, statistics: Statistics) -> Shift:
            return shift(self.networks, sgd.params(progress), statistics, sample, reference, greatest)

        found = moved(sgd_result.progress, statistics)
        limit = kl_limiter.limit(self.config, sgd_result.tuning)
        if sgd_result.skipped is None or limit is None:
            return sgd_result, statistics, found
        minibatches = state.tuning.epochs * self.config.ppo.num_minibatches
        over, skipped, tuning = kl_limiter.check_iteration(
            sgd_result.skipped, found.mean, sgd_result.tuning, limit, minibatches
        )
        start = sgd.start(state)
        start = start._replace(sums=jax.tree.map(jnp.zeros_like, sgd_result.progress.sums))
        (progress, statistics), _, found = apply_if(
            over,
            lambda carry: (carry[1], carry[1], moved(*carry[1])),
            ((sgd_result.progress, statistics), (start, before), found),
        )
        return sgd_result._replace(progress=progress, skipped=skipped, tuning=tuning), statistics, found

    def metrics(
        self, state: TrainState, statistics: Statistics, data: Collected, shift: Shift | None
    ) -> dict[str, jax.Array]:
        """Metrics of the distance; arguments as for `enforce`, after it."""
        metrics: dict[str, jax.Array] = {}
        if shift is not None:
            metrics |= {"training/policy_distance": shift.mean, "training/policy_distance_p99": shift.p99}
        if self.config.guards.limiters.kl is not None and self.config.ppo.normalize_observations:
            skipped_share = normalizer.skipped_share(state.normalizer, statistics, data.reward, data.valid)
            metrics["limiters/normalizer/active"] = skipped_share
        return metrics

    def _moments(self, params: Params, statistics: Statistics, data: Collected) -> ActionMoments:
        observation = masked.finite(data.observation, data.valid)
        return moments(self.networks.distribution(params, statistics, observation)[0])


def subsample(tree: Any, shape: tuple[int, ...]) -> Any:
    """Unrolls at equal distances, about `_SAMPLES` steps of them: enough for a mean, and a fraction of a pass.

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
    """Distance from a reference to the policy of some parameters and statistics.

    Args:
        networks: The policy's, for observations as they were collected.
        params: Its parameters.
        statistics: Its observation statistics.
        data: Experience `[rows, T]`, for its observations and their mask.
        reference: Moments of the other policy in the same samples.
        limit: The bound of the mean; None for none.
    """
    observation = masked.finite(data.observation, data.valid)
    present = moments(networks.distribution(params, statistics, observation)[0])
    moved = distance(reference, present)
    mean = masked.mean(jnp.minimum(moved, sample_cap(limit)), data.valid, masked.share(data.valid))
    if data.valid is None:
        percentile = jnp.quantile(moved, 0.99)
    else:
        known = jnp.nanquantile(jnp.where(data.valid, moved, jnp.nan), 0.99)
        percentile = jnp.where(jnp.any(data.valid), known, 0.0)
        percentile = jnp.where(jnp.any(data.valid & jnp.isnan(moved)), jnp.nan, percentile)
    return Shift(sharding.mean(mean), sharding.mean(percentile))


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
    """The new statistics, or a blend of old and new, so that the normaliser moves the policy little.

    Backtracking: the update is halved until the distance fits, and dropped after `_HALVINGS`. The first batch is taken
    in full, since nothing is learnt yet that could be lost.

    Args:
        networks: The policy's, for observations as they were collected.
        params: Its parameters.
        old: Observation statistics before the batch.
        new: After it.
        data: Experience `[rows, T]`, for its observations and their mask.
        reference: Moments of the policy under `old` in the same samples.
        limit: Of the policy's mean distance, in nats, of which the normaliser has a part.
        config: Epsilon of the standard deviation.
    """
    first = old.count == 0
    normalizer_limit = jnp.minimum(_NORMALIZER_SHARE * limit, _NORMALIZER_LIMIT)

    def moved(statistics: Statistics) -> jax.Array:
        return jnp.where(first, 0.0, shift(networks, params, statistics, data, reference, limit).mean)

    def shorter(carry: tuple[Statistics, jax.Array, jax.Array]) -> tuple[Statistics, jax.Array, jax.Array]:
        share = 0.5 * carry[1]
        share = jnp.where(share < 0.5**_HALVINGS, 0.0, share)
        statistics = normalizer.blend(old, new, share, config)
        return statistics, share, moved(statistics)

    def too_far(carry: tuple[Statistics, jax.Array, jax.Array]) -> jax.Array:
        return ~(carry[2] <= normalizer_limit) & (carry[1] > 0.0)

    return jax.lax.while_loop(too_far, shorter, (new, jnp.ones(()), moved(new)))[0]
