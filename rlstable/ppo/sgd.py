"""The SGD epochs of an iteration: shuffle, then gradient, candidate, update guards and select for each minibatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable.config import Config
from rlstable.device.packed import PackedDict
from rlstable.device.precision import Precision
from rlstable.device.trees import PyTree
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, both, fold, select
from rlstable.guards.update import UpdateContext
from rlstable.ppo import kl_limiter
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.networks import Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Candidate, Optimizer, Rates, adapt_loss_scale, adapt_to_kl
from rlstable.ppo.records import Batch, Minibatch
from rlstable.ppo.state import Counters, TrainState, Tuning

Mask = jax.Array | bool
Gradient = Callable[[Params, Statistics, Minibatch, jax.Array | None, Tuning], tuple[Params, dict[str, jax.Array]]]

_NO_SUMS = PackedDict.of({})


class SGDState(NamedTuple):
    """Parameters, optimizer state and metrics after some minibatches.

    Attributes:
        params: Network parameters.
        opt_state: Optimizer state.
        sums: Metrics, summed over accepted minibatches.
        accepted: Number of accepted minibatches, int32.
    """

    params: Params
    opt_state: PyTree
    sums: PackedDict
    accepted: jax.Array


class SGDCarry(NamedTuple):
    """Carry of the loop over minibatches.

    Attributes:
        progress: Parameters, optimizer state and metrics so far.
        tuning: Traced numbers that schedules and limiters change. A rejected update does not reset them.
        guard_state: States of the guards, by name.
        key: Random key of the next epoch.
        skipped: Minibatches without an update since the policy moved too far, int32, 0 if it has not; None without the
            KL limiter.
    """

    progress: SGDState
    tuning: Tuning
    guard_state: dict[str, GuardState]
    key: jax.Array
    skipped: jax.Array | None


class _Proposal(NamedTuple):
    """One candidate update before the guards judge it.

    Attributes:
        candidate: New parameters and optimizer state.
        gradient_norm: Global norm of the gradient.
        rates: Learning rates of the candidate.
        tuning: Tuning after the loss scale and the adaptive rate were updated by this minibatch.
        usable: Whether the minibatch has valid samples and, in float16, finite gradients.
        expected_rejection: Whether a rejection is part of normal operation, such as the search for a loss scale. Guards
            then neither count a trip nor update their memory.
        metrics: Metrics of the loss.
    """

    candidate: Candidate
    gradient_norm: jax.Array
    rates: Rates
    tuning: Tuning
    usable: Mask
    expected_rejection: Mask
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Epochs and minibatches of one iteration.

    Attributes:
        config: The whole configuration.
        optimizer: Turns gradients into candidate updates.
        precision: Precision level; SGD reads its loss scale.
        guards: Guards of the update site, by name.
        gradient: Computes the gradient of the loss on a minibatch over all devices, and metrics of the loss.
    """

    config: Config
    optimizer: Optimizer
    precision: Precision
    guards: Mapping[str, Guard]
    gradient: Gradient

    def start(self, state: TrainState) -> SGDState:
        """Parameters and optimizer state before the first minibatch."""
        return SGDState(state.params, state.opt_state, _NO_SUMS, jnp.zeros((), jnp.int32))

    def run(
        self,
        state: TrainState,
        statistics: Statistics,
        batch: Batch,
        guard_state: dict[str, GuardState],
        key: jax.Array,
    ) -> SGDCarry:
        """Runs all epochs over one batch."""
        skipped = None if self.config.guards.limiters.kl is None else jnp.zeros((), jnp.int32)
        layout = ParamFlattener.of(state.params)
        start = self.start(state)
        start = start._replace(
            params=layout.join(start.params), opt_state=layout.join_subtrees(start.opt_state)
        )  # fmt: skip
        carry = SGDCarry(start, state.tuning, guard_state, key, skipped)
        rows = batch.collected.log_prob.shape[0] // self.config.ppo.num_minibatches
        # `jax.jit` makes `eval_shape` and the loop share one trace.
        traced_once = jax.jit(functools.partial(self.step, layout=layout), inline=True)

        def step(carry: SGDCarry, minibatch: Minibatch) -> tuple[SGDCarry, PackedDict]:
            return traced_once(statistics, state.counters, carry, minibatch)

        def metrics() -> PackedDict:  # only for the names and shapes of the sums
            return step(carry, Minibatch.of(jax.tree.map(lambda x: x[:rows], batch), key))[1]

        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(metrics))
        carry = _with_sums(carry, sums)
        fallback = None if skipped is None else carry.progress
        (carry, _), _ = jax.lax.scan(
            lambda loop, _: (self._epoch(*loop, batch, step), None),
            (carry, fallback),
            length=self.config.ppo.num_updates_per_batch,
        )
        progress = carry.progress._replace(
            params=layout.split(carry.progress.params),
            opt_state=layout.split_subtrees(carry.progress.opt_state, state.opt_state),
        )
        return carry._replace(progress=progress)

    def _epoch(
        self,
        carry: SGDCarry,
        fallback: SGDState | None,
        batch: Batch,
        step: Callable[[SGDCarry, Minibatch], tuple[SGDCarry, PackedDict]],
    ) -> tuple[SGDCarry, SGDState | None]:
        """Shuffles this device's unrolls and takes one step per minibatch.

        Args:
            carry: State before the epoch.
            fallback: State to return to if the policy moves too far in this epoch; None without the KL limiter.
            batch: This device's data.
            step: Takes one SGD step from a carry without sums; returns the next one, and metrics to add to the sums.

        Returns:
            The carry after the epoch, and the fallback of the next epoch.
        """
        key, key_shuffle, key_loss = jax.random.split(carry.key, 3)
        order = jax.random.permutation(key_shuffle, batch.collected.log_prob.shape[0])

        def take_rows(loop: tuple[SGDCarry, jax.Array], rows: jax.Array) -> tuple[tuple[SGDCarry, jax.Array], None]:
            carry, key = loop
            key, key_noise = jax.random.split(key)
            minibatch = Minibatch.of(jax.tree.map(lambda x: x[rows], batch), key_noise)
            sums = carry.progress.sums
            carry, metrics = step(_with_sums(carry, _NO_SUMS), minibatch)
            return (_with_sums(carry, dataclasses.replace(sums, whole=sums.whole + metrics.whole)), key), None

        # Shuffling row numbers instead of data avoids a second copy of the batch.
        minibatches = jnp.reshape(order, (self.config.ppo.num_minibatches, -1))
        (after, _), _ = jax.lax.scan(take_rows, (carry, key_loss), minibatches)
        progress, fallback = kl_limiter.close_epoch(after.skipped, carry.progress, fallback, after.progress)
        return after._replace(progress=progress, key=key), fallback

    def step(
        self,
        statistics: Statistics,
        counters: Counters,
        carry: SGDCarry,
        minibatch: Minibatch,
        layout: ParamFlattener | None = None,
    ) -> tuple[SGDCarry, PackedDict]:
        """Computes a candidate update, and applies it unless a guard or the KL limiter rejects it.

        Returns:
            The next carry, with the same sums, and the metrics of the minibatch; zeros if the update is rejected,
            because its metrics may be NaN.
        """
        progress = carry.progress
        proposal = self._propose(statistics, counters, carry, minibatch, layout)
        candidate, metrics, expected_rejection = proposal.candidate, proposal.metrics, proposal.expected_rejection
        context = UpdateContext(
            (candidate.params, candidate.opt_state),
            proposal.gradient_norm,
            candidate.update_norm,
            candidate.parameter_norm,
        )
        (new_params, new_opt), ok, guard_state = fold(self.guards, context, carry.guard_state)
        ok = both(ok, proposal.usable)
        limit = kl_limiter.limit(self.config, proposal.tuning)
        updating, skipped, tuning = kl_limiter.check(carry.skipped, metrics, proposal.tuning, limit)
        if updating is not True:
            # If the distance is NaN, guards must see the update: one of them may know the cause.
            is_nan = kl_limiter.still_updating(carry.skipped) & jnp.isnan(metrics["training/policy_distance"])
            expected_rejection |= ~updating & ~is_nan
            ok = both(ok, updating)
        if expected_rejection is not False:
            guard_state = select(jnp.logical_not(expected_rejection), guard_state, carry.guard_state)
        packed = PackedDict.of(metrics | self._metrics(proposal, tuning))
        packed = dataclasses.replace(packed, whole=select(ok, packed.whole, jnp.zeros_like(packed.whole)))
        params, opt_state = select(ok, (new_params, new_opt), (progress.params, progress.opt_state))
        progress = SGDState(
            params,
            opt_state,
            sums=progress.sums,
            accepted=progress.accepted + jnp.asarray(1 if ok is True else ok, jnp.int32),
        )
        return SGDCarry(progress, tuning, guard_state, carry.key, skipped), packed

    def _propose(
        self,
        statistics: Statistics,
        counters: Counters,
        carry: SGDCarry,
        minibatch: Minibatch,
        layout: ParamFlattener | None,
    ) -> _Proposal:
        """Computes the candidate update of a minibatch, and the tuning after the minibatch."""
        tuning, valid = carry.tuning, minibatch.collected.valid
        before = carry.progress
        params = before.params if layout is None else layout.split(before.params)
        gradients, metrics = self.gradient(params, statistics, minibatch, masked.share(valid), tuning)
        if self.optimizer.separate_rates:
            # While the policy is held, Adam's moments must not accumulate gradients: the first step after the hold
            # would be too long.
            held = tuning.policy_hold > 0
            gradients = {**gradients, "policy": jax.tree.map(lambda g: jnp.where(held, 0.0, g), gradients["policy"])}
        gradients = gradients if layout is None else layout.join(gradients)
        norm = optax.global_norm(gradients)

        usable: Mask = masked.any_valid(valid)
        expected_rejection: Mask = False
        updating = kl_limiter.still_updating(carry.skipped)
        if self.precision.loss_scale is not None:
            finite = jnp.isfinite(norm)
            usable &= finite
            expected_rejection = ~finite & (tuning.loss_scale > self.precision.loss_scale.floor)
            tuning = select(updating, adapt_loss_scale(tuning, finite, self.precision.loss_scale), tuning)
        if self.config.ppo.learning_rate_schedule == "adaptive_kl":
            adapted = adapt_to_kl(tuning, metrics["training/kl_mean"], self.config.ppo)
            tuning = select(updating, adapted, tuning)
        # Schedules use the steps at the iteration's end: the first iteration of a warm-up must not have rate 0.
        env_steps = counters.env_steps + self.config.env_steps_per_iteration
        rates = self.optimizer.rates(tuning, env_steps)
        clip_scale = tuning.clip_scale if self.config.may_tighten_clipping else None
        candidate = self.optimizer.candidate(
            gradients, norm, before.opt_state, before.params, rates, clip_scale, layout
        )
        return _Proposal(candidate, norm, rates, tuning, usable, expected_rejection, metrics)

    def _metrics(self, proposal: _Proposal, tuning: Tuning) -> dict[str, jax.Array]:
        """Metrics of the gradient, the optimizer and its limiters."""
        candidate, rates = proposal.candidate, proposal.rates
        metrics = {
            "training/grad_norm": proposal.gradient_norm,
            "training/update_norm": candidate.update_norm,
            "training/learning_rate": rates.policy,
        }
        if rates.value is not rates.policy:
            metrics["training/value_learning_rate"] = rates.value
        metrics |= {f"limiters/{name}/active": active for name, active in candidate.activity.items()}
        if self.precision.loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        return metrics


def _with_sums(carry: SGDCarry, sums: PackedDict) -> SGDCarry:
    return carry._replace(progress=carry.progress._replace(sums=sums))
