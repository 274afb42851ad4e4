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
from rlstable.device import sharding
from rlstable.device.transforms import apply_if
from rlstable.device.trees import PyTree
from rlstable.guards import masked
from rlstable.guards.base import all_finite, select
from rlstable.ppo import kl_limiter, normalizer
from rlstable.ppo.distance import ActionMoments, distance, moments, sample_cap
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.records import Collected
from rlstable.ppo.sgd import SGD, SGDCarry, SGDState
from rlstable.ppo.state import TrainState

_SAMPLES = 1024  # per device, for the distance over a whole iteration
# Nats that the normaliser alone may move the policy in one iteration; SGD moves the policy by about 0.04.
_NORMALIZER_LIMIT = 0.1
_LARGE = 10.0  # size of a first observation above which the networks get a smaller one
_NORMALIZER_SHARE = 0.5  # of the policy's limit, if that is smaller than `_NORMALIZER_LIMIT`


class Shift(NamedTuple):
    """Distance between two policies over a batch, float32 scalars in nats, the same on every device.

    Attributes:
        mean: Mean over the valid samples.
        p99: 99th percentile of the valid samples, 0 without any. With several devices the mean of their percentiles.
    """

    mean: jax.Array
    p99: jax.Array


class NormalizerUpdate(NamedTuple):
    """Observation statistics after a batch.

    Attributes:
        statistics: The new statistics.
        params: Network parameters, rescaled if the statistics alone would have moved the policy too far.
        rescaled: Whether they are rescaled; None if nothing bounds the normaliser.
        shifted: Share of the observation elements that took the batch's statistics at once; None without the limiter.
    """

    statistics: Statistics
    params: Params
    rescaled: jax.Array | None
    shifted: jax.Array | None = None


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

    def before_first_batch(self, state: TrainState) -> TrainState:
        """Divides elements of large first observations by their size until the statistics have samples.

        The first batch has no statistics yet. Raw observations of a thousand would saturate the policy that collects,
        and the policy would learn from actions that it never chooses again.
        """
        if self.config.guards.limiters.observation_shift is None or not self.config.ppo.normalize_observations:
            return state
        statistics, observation = state.normalizer, self.networks.select(state.env_state.obs)
        sizes = jax.tree.map(lambda x: sharding.maximum(jnp.max(jnp.abs(x), axis=0)), observation)
        first = jax.tree.map(lambda size: jnp.where((size > _LARGE) & jnp.isfinite(size), size, 1.0), sizes)
        std = select(statistics.count == 0, first, statistics.std)
        return dataclasses.replace(state, normalizer=dataclasses.replace(statistics, std=std))

    def before_sgd(self, state: TrainState, data: Collected) -> tuple[TrainState, NormalizerUpdate]:
        """The state and the observation statistics that SGD starts from; Brax moves the normaliser here."""
        if not (self.config.ppo.normalize_observations and self.config.ppo.updates_normalizer_first):
            return state, NormalizerUpdate(state.normalizer, state.params, None)
        update = self._updated(state, state.normalizer, state.params, data, collecting=True)
        return dataclasses.replace(state, params=update.params), update

    def after_sgd(
        self,
        sgd: SGD,
        state: TrainState,
        update: NormalizerUpdate,
        statistics: Statistics,
        data: Collected,
        reference: ActionMoments | None,
        result: SGDCarry,
    ) -> tuple[SGDCarry, Statistics, dict[str, jax.Array]]:
        """Moves the normaliser if it follows SGD, and undoes an iteration that moved the policy too far.

        Args:
            sgd: SGD of this iteration.
            state: Training state that SGD started from.
            update: Result of `before_sgd`.
            statistics: Statistics that SGD used.
            data: The batch.
            reference: Result of `reference`.
            result: Result of SGD.

        Returns:
            The SGD result and the statistics, both undone after an overshoot, and metrics.
        """
        if self.config.ppo.normalize_observations and not self.config.ppo.updates_normalizer_first:
            update = self._updated(state, statistics, result.progress.params, data)
            result = result._replace(progress=result.progress._replace(params=update.params))
            statistics = update.statistics
        result, statistics, moved = self._enforce(sgd, state, statistics, data, reference, result)
        return result, statistics, self._metrics(state, update, moved)

    def reference(self, state: TrainState, statistics: Statistics, data: Collected) -> ActionMoments | None:
        """Action moments of the collecting policy, the reference of the distance; None if nothing needs the distance.

        The first batch was collected with empty observation statistics, and the policy has learned nothing that could
        be lost. So for the first batch the reference is the policy with the new statistics.
        """
        if not self.needs_distance:
            return None
        reference = moments(data.distribution)
        if self.config.ppo.normalize_observations and statistics is not state.normalizer:

            def with_new_statistics(_: ActionMoments) -> ActionMoments:
                return self._moments(state.params, statistics, data)

            reference = apply_if(state.normalizer.count == 0, with_new_statistics, reference)
        return reference

    def _updated(
        self, state: TrainState, old: Statistics, params: Params, data: Collected, collecting: bool = False
    ) -> NormalizerUpdate:
        """Updates the observation statistics with a batch.

        If the new statistics would move the policy too far, the first layers of the networks are rescaled with the
        statistics, so that the policy stays the same function (`Networks.rescale_inputs`). The first batch is applied
        without rescaling, because the policy has learned nothing that could be lost.

        Args:
            state: Training state before the batch, for its tuning.
            old: Statistics before the batch.
            params: Network parameters to measure the distance with.
            data: The batch.
            collecting: Whether these parameters and the old statistics collected the batch.
        """
        limits = self.config.guards.limiters
        intact = normalizer.with_divisors(old, self.config.ppo, limits.observation_shift)
        new, shifted = normalizer.update(
            intact, data.observation, data.valid, self.config.ppo, limits.observation_outlier,
            shift=limits.observation_shift,
        )  # fmt: skip
        limit = kl_limiter.limit(self.config, state.tuning)
        if limit is None and limits.observation_shift is None and not self.optimizer.separate_rates:
            return NormalizerUpdate(new, params, None)
        preserves = jnp.zeros((), bool)
        if limits.observation_shift is not None:
            preserves |= jnp.any(began_to_vary(old, new))
        if self.optimizer.separate_rates:
            # If the policy is held or slowed, SGD cannot correct the policy after the normaliser has moved it.
            preserves |= self.optimizer.policy_pace(state.tuning) < 1.0
        if limit is not None:
            sample = subsample(data, data.log_prob.shape)
            before = moments(sample.distribution) if collecting else self._moments(params, old, sample)
            moved = shift(self.networks, params, new, sample, before, limit).mean
            preserves |= ~(moved <= jnp.minimum(_NORMALIZER_SHARE * limit, _NORMALIZER_LIMIT))
        rescaled = self.networks.rescale_inputs(params, intact, new)
        update = with_same_function(params, rescaled, old, new, preserves & (old.count > 0))
        return update._replace(shifted=shifted)

    def _enforce(
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
            moved = self.reference(state, statistics, sample)
            reference = reference if moved is None else moved
            before = select(state.normalizer.count == 0, statistics, state.normalizer)
        configured_limit = self.config.guards.limiters.kl

        def measure(progress: SGDState, statistics: Statistics) -> Shift:
            return shift(self.networks, progress.params, statistics, sample, reference, configured_limit)

        measured = measure(sgd_result.progress, statistics)
        limit = kl_limiter.limit(self.config, sgd_result.tuning)
        if sgd_result.skipped is None or limit is None:
            return sgd_result, statistics, measured
        minibatches = self.config.ppo.num_updates_per_batch * self.config.ppo.num_minibatches
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

    def _metrics(self, state: TrainState, update: NormalizerUpdate, shift: Shift | None) -> dict[str, jax.Array]:
        metrics: dict[str, jax.Array] = {}
        if shift is not None:
            metrics |= {"training/policy_distance": shift.mean, "training/policy_distance_p99": shift.p99}
        if update.rescaled is not None:
            metrics["limiters/normalizer/active"] = update.rescaled.astype(jnp.float32)
        if update.shifted is not None:
            metrics["limiters/observation_shift/active"] = update.shifted
            began = began_to_vary(state.normalizer, update.statistics)
            first = jnp.where(jnp.any(began), jnp.argmax(began) + 1, 0)
            metrics["training/element_that_began_to_vary"] = first.astype(jnp.float32)
        return metrics

    def _moments(self, params: Params, statistics: Statistics, data: Collected) -> ActionMoments:
        observation = masked.zero_invalid_nonfinite(data.observation, data.valid)
        return moments(self.networks.distribution(params, statistics, observation)[0])


def with_same_function(
    params: Params, rescaled: Params, old: Statistics, new: Statistics, preserves: jax.Array
) -> NormalizerUpdate:
    """New observation statistics, with parameters that compute the same actions and values as before if asked.

    If the result is not finite, everything stays, so that the state guards find what is wrong.

    Args:
        params: Network parameters that fit `old`.
        rescaled: Network parameters that compute the same with `new`.
        old: Observation statistics before the batch.
        new: Observation statistics after the batch.
        preserves: Whether the networks must stay the same functions, a scalar.
    """
    finite = all_finite((new, select(preserves, rescaled, params)))
    preserves &= finite
    return NormalizerUpdate(select(finite, new, old), select(preserves, rescaled, params), preserves)


def began_to_vary(old: Statistics, new: Statistics) -> jax.Array:
    """Whether each observation element was constant in earlier batches and no longer is, `[n]`, leaf after leaf."""
    pairs = zip(jax.tree.leaves(normalizer.constant(old)), jax.tree.leaves(normalizer.constant(new)), strict=True)
    began = jnp.concatenate([jnp.ravel(before & ~after) for before, after in pairs])
    return began & (old.count > 0)


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
    used = masked.filled(valid, x)
    position = 0.01 * (jnp.maximum(jnp.sum(used), 1) - 1)  # from the largest number
    largest = jax.lax.top_k(jnp.where(used, x, -jnp.inf).ravel(), math.ceil(0.01 * (x.size - 1)) + 1)[0]
    below = jnp.floor(position).astype(jnp.int32)
    upper, lower = largest[below], largest[jnp.minimum(below + 1, largest.size - 1)]
    share = position - below
    percentile = jnp.where(share > 0, upper * (1.0 - share) + lower * share, upper)
    percentile = jnp.where(jnp.any(used), percentile, 0.0)
    return jnp.where(jnp.any(used & jnp.isnan(x)), jnp.nan, percentile)
