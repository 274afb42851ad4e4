"""Trust region: bounds the distance that one iteration moves the policy, by SGD and by the normaliser together.

The distance compares the policy that collected the batch with the policy that will collect the next batch. It compares
the actions that the environment receives (`distance`).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
from rlstable.ppo.records import Collected, swap_axes
from rlstable.ppo.settings import Settings
from rlstable.ppo.sgd import SGD, SGDCarry, SGDState
from rlstable.ppo.state import TrainState, Tuning

_SAMPLES = 1024  # per device, for the distance over a whole iteration
# Nats that the normaliser alone may move the policy in one iteration; SGD moves the policy by about 0.04.
_NORMALIZER_LIMIT = 0.1
_LARGE = 10.0  # size of a first observation above which the networks get a smaller one
_DRIFTING = 1.5  # standard deviations from the mean so far; numbers that grow steadily are always sqrt(3) away
_NORMALIZER_SHARE = 0.5  # of the policy's limit, if that is smaller than `_NORMALIZER_LIMIT`


class NormalizerUpdate(NamedTuple):
    """Observation statistics after a batch.

    Attributes:
        statistics: The new statistics.
        params: Network parameters, rescaled if the statistics alone would have moved the policy too far.
        rescaled: Whether they are rescaled; None if nothing bounds the normaliser.
        shifted: Share of the observation elements that took the batch's statistics at once; None without the limiter.
        away: Distance of the batch from the statistics before it, `normalizer.Update.away`.
    """

    statistics: Statistics
    params: Params
    rescaled: jax.Array | None
    shifted: jax.Array | None = None
    away: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class TrustRegion:
    """The bound on the policy's distance over a whole iteration; the networks are those for raw observations."""

    settings: Settings
    networks: Networks
    optimizer: Optimizer

    def before_first_batch(self, state: TrainState) -> TrainState:
        """Divides elements of large first observations by their size until the statistics have samples.

        The first batch has no statistics yet. Raw observations of a thousand would saturate the policy that collects,
        and the policy would learn from actions that it never chooses again.
        """
        if self.settings.limits.observation_shift is None or not self.settings.ppo.normalize_observations:
            return state
        statistics, observation = state.normalizer, self.networks.select(state.env_state.obs)
        sizes = jax.tree.map(lambda x: sharding.maximum(jnp.max(jnp.abs(x), axis=0)), observation)
        first = jax.tree.map(lambda size: jnp.where((size > _LARGE) & jnp.isfinite(size), size, 1.0), sizes)
        std = select(statistics.count == 0, first, statistics.std)
        return dataclasses.replace(state, normalizer=dataclasses.replace(statistics, std=std))

    def before_sgd(self, state: TrainState, data: Collected) -> tuple[TrainState, NormalizerUpdate]:
        """The state and the observation statistics that SGD starts from; Brax moves the normaliser here."""
        if not (self.settings.ppo.normalize_observations and self.settings.ppo.updates_normalizer_first):
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

        `state` and `statistics` are those that SGD started from.

        Returns:
            The SGD result and the statistics, both undone after an overshoot, and metrics.
        """
        if self.settings.ppo.normalize_observations and not self.settings.ppo.updates_normalizer_first:
            update = self._updated(state, statistics, result.progress.params, data)
            result = result._replace(progress=result.progress._replace(params=update.params))
            statistics = update.statistics
        result, statistics, moved = self._enforce(sgd, state, statistics, data, reference, result)
        return result, statistics, self._metrics(state, update, moved)

    def next_tuning(self, result: SGDCarry) -> Tuning:
        """The next iteration's tuning: longer steps if the policy did not overshoot, and one held iteration fewer."""
        tuning = kl_limiter.relax(result.skipped, result.tuning)
        if not self.optimizer.separate_rates:
            return tuning
        return dataclasses.replace(tuning, policy_hold=jnp.maximum(tuning.policy_hold - 1, 0))

    def reference(self, state: TrainState, statistics: Statistics, data: Collected) -> ActionMoments | None:
        """Action moments of the collecting policy, the reference of the distance; None if nothing needs a distance.

        The first batch was collected with empty observation statistics, and the policy has learned nothing that could
        be lost. So for the first batch the reference is the policy with the new statistics.
        """
        if self.settings.limits.kl is None and not self.settings.watches_policy:
            return None
        reference = moments(data.distribution)
        if self.settings.ppo.normalize_observations and statistics is not state.normalizer:

            def with_new_statistics(_: ActionMoments) -> ActionMoments:
                return self._moments(state.params, statistics, data)

            reference = apply_if(state.normalizer.count == 0, with_new_statistics, reference)
        return reference

    def mean_distance(
        self,
        params: Params,
        statistics: Statistics,
        data: Collected,
        reference: ActionMoments,
        limit: jax.Array | float | None,
    ) -> jax.Array:
        """Mean distance from a reference policy to the policy with these parameters and statistics, on all devices.

        The reference has the action moments on the same samples; `limit` sets the cap per sample, None for no limit.
        """
        moved = distance(reference, self._moments(params, statistics, data))
        mean = masked.mean(jnp.minimum(moved, sample_cap(limit)), data.valid, masked.share(data.valid))
        return sharding.mean(mean)

    def _updated(
        self, state: TrainState, old: Statistics, params: Params, data: Collected, collecting: bool = False
    ) -> NormalizerUpdate:
        """Updates the observation statistics with a batch.

        If the new statistics would move the policy too far, the first layers of the networks are rescaled with the
        statistics, so that the policy stays the same function (`Networks.rescale_inputs`). The first batch is applied
        without rescaling, because the policy has learned nothing that could be lost.

        `collecting` tells that these parameters and the old statistics collected the batch.
        """
        limits = self.settings.limits
        intact = normalizer.with_divisors(old, self.settings.ppo, limits.observation_shift)
        new, shifted, away = normalizer.update(
            intact, data.observation, data.valid, self.settings.ppo, limits.observation_outlier,
            shift=limits.observation_shift,
        )  # fmt: skip
        limit = kl_limiter.limit(self.settings, state.tuning)
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
            moved = self.mean_distance(params, new, sample, before, limit)
            preserves |= ~(moved <= jnp.minimum(_NORMALIZER_SHARE * limit, _NORMALIZER_LIMIT))
        rescaled = self.networks.rescale_inputs(params, intact, new)
        update = with_same_function(params, rescaled, old, new, preserves & (old.count > 0))
        return update._replace(shifted=shifted, away=away)

    def _enforce(
        self,
        sgd: SGD,
        state: TrainState,
        statistics: Statistics,
        data: Collected,
        reference: ActionMoments | None,
        sgd_result: SGDCarry,
    ) -> tuple[SGDCarry, Statistics, jax.Array | None]:
        """Measures how far the iteration moved the policy, and undoes the iteration beyond the KL limiter's bound.

        Statistics that were updated after SGD were bounded for SGD's parameters, so both are undone together.
        """
        if reference is None:
            return sgd_result, statistics, None
        sample, reference = subsample((data, reference), data.log_prob.shape)
        before = statistics
        if self.settings.ppo.normalize_observations and not self.settings.ppo.updates_normalizer_first:
            moved = self.reference(state, statistics, sample)
            reference = reference if moved is None else moved
            before = select(state.normalizer.count == 0, statistics, state.normalizer)

        def measure(progress: SGDState, statistics: Statistics) -> jax.Array:
            return self.mean_distance(progress.params, statistics, sample, reference, self.settings.limits.kl)

        measured = measure(sgd_result.progress, statistics)
        limit = kl_limiter.limit(self.settings, sgd_result.tuning)
        if sgd_result.skipped is None or limit is None:
            return sgd_result, statistics, measured
        minibatches = self.settings.ppo.num_updates_per_batch * self.settings.ppo.num_minibatches
        overshot, skipped, tuning = kl_limiter.check_iteration(
            sgd_result.skipped, measured, sgd_result.tuning, limit, minibatches
        )
        start = sgd.start(state)
        start = start._replace(sums=jax.tree.map(jnp.zeros_like, sgd_result.progress.sums))
        (progress, statistics), _, measured = apply_if(
            overshot,
            lambda operand: (operand[1], operand[1], measure(*operand[1])),
            ((sgd_result.progress, statistics), (start, before), measured),
        )
        return sgd_result._replace(progress=progress, skipped=skipped, tuning=tuning), statistics, measured

    def _metrics(self, state: TrainState, update: NormalizerUpdate, moved: jax.Array | None) -> dict[str, jax.Array]:
        metrics = {} if moved is None else {"training/policy_distance": moved}
        if update.rescaled is not None:
            metrics["limiters/normalizer/active"] = update.rescaled.astype(jnp.float32)
        if update.shifted is not None:
            metrics["limiters/observation_shift/active"] = update.shifted
            began = began_to_vary(state.normalizer, update.statistics)
            first = jnp.where(jnp.any(began), jnp.argmax(began) + 1, 0)
            metrics["training/element_that_began_to_vary"] = first.astype(jnp.float32)
        if update.away is not None:
            drifting = jnp.where(jnp.max(update.away) > _DRIFTING, jnp.argmax(update.away) + 1, 0)
            metrics["training/drifting_element"] = drifting.astype(jnp.float32)
        return metrics

    def _moments(self, params: Params, statistics: Statistics, data: Collected) -> ActionMoments:
        observation = masked.zero_invalid_nonfinite(data.observation, data.valid)
        if data.memory is None:
            return moments(self.networks.distribution(params, statistics, observation)[0])
        unrolls = swap_axes(data._replace(observation=observation))
        return moments(swap_axes(self.networks.over_time(params, statistics, unrolls)[0]))


def with_same_function(
    params: Params, rescaled: Params, old: Statistics, new: Statistics, preserves: jax.Array
) -> NormalizerUpdate:
    """New observation statistics, with parameters that compute the same actions and values as before if asked.

    If the result is not finite, everything stays, so that the state guards find what is wrong. `preserves` is a scalar.
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
    """Takes every n-th unroll of `(rows, T)`, about `_SAMPLES` steps: enough for a mean, at a fraction of the cost."""
    rows, steps = shape
    stride = max(1, rows * steps // _SAMPLES)
    return jax.tree.map(lambda x: x[:: min(stride, rows)], tree)
