"""The SGD epochs of an iteration: shuffle, then gradient, candidate, update guards and select for each minibatch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

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
from rlstable.ppo.optimizer import Candidate, Optimizer, adapt_loss_scale, adapt_to_kl
from rlstable.ppo.records import Batch, Minibatch
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import Counters, TrainState, Tuning

Mask = jax.Array | bool
Gradient = Callable[[Params, Statistics, Minibatch, jax.Array | None, Tuning], tuple[Params, dict[str, jax.Array]]]

_NO_SUMS = PackedDict.of({})


class SGDState(NamedTuple):
    """Parameters, optimizer state and metrics after some minibatches.

    Attributes:
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
        tuning: Traced numbers that schedules and limiters change. A rejected update does not reset them.
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
        tuning: Tuning after the loss scale and the adaptive rate were updated by this minibatch.
        usable: Whether the minibatch has valid samples and, in float16, finite gradients.
        judged: False if a rejection is part of normal operation, such as the search for a loss scale. Guards then
            neither count a trip nor update their memory.
        metrics: Metrics of the loss, the gradient, the optimizer and its limiters.
    """

    candidate: Candidate
    gradient_norm: jax.Array
    tuning: Tuning
    usable: Mask
    judged: Mask
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Epochs and minibatches of one iteration.

    Attributes:
        guards: Guards of the update site, by name.
        gradient: Computes the gradient of the loss on a minibatch over all devices, and metrics of the loss.
    """

    settings: Settings
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
        skipped = None if self.settings.limits.kl is None else jnp.zeros((), jnp.int32)
        layout = ParamFlattener.of(state.params)
        start = self.start(state)
        start = start._replace(params=layout.join(start.params), opt_state=layout.join_subtrees(start.opt_state))
        carry = SGDCarry(start, state.tuning, guard_state, key, skipped)
        rows = batch.collected.log_prob.shape[0] // self.settings.ppo.num_minibatches
        # `jax.jit` makes `eval_shape` and the loop share one trace.
        traced_once = jax.jit(functools.partial(self.step, layout), inline=True)
        step = functools.partial(traced_once, statistics, state.counters)
        first = jax.eval_shape(lambda: Minibatch.of(jax.tree.map(lambda x: x[:rows], batch), key))
        share = None if batch.collected.valid is None else jax.eval_shape(lambda: jnp.ones(()))
        _, metrics = jax.eval_shape(step, carry, first, share)
        carry = _with_sums(carry, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics))
        fallback = None if skipped is None else carry.progress
        (carry, _), _ = jax.lax.scan(
            lambda loop, _: (self._epoch(*loop, batch, step), None),
            (carry, fallback),
            length=self.settings.ppo.num_updates_per_batch,
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
        step: Callable[[SGDCarry, Minibatch, jax.Array | None], tuple[SGDCarry, PackedDict]],
    ) -> tuple[SGDCarry, SGDState | None]:
        """Shuffles this device's unrolls and takes one step per minibatch.

        `fallback` is the state to return to if the policy moves too far in this epoch, None without the KL limiter.
        `step` takes a carry without sums, and returns the next one and the metrics to add to the sums.
        """
        key, key_shuffle, key_loss = jax.random.split(carry.key, 3)
        order = jax.random.permutation(key_shuffle, batch.collected.log_prob.shape[0])

        def take_rows(
            loop: tuple[SGDCarry, jax.Array], chosen: tuple[jax.Array, jax.Array | None]
        ) -> tuple[tuple[SGDCarry, jax.Array], None]:
            (carry, key), (rows, share) = loop, chosen
            key, key_noise = jax.random.split(key)
            minibatch = Minibatch.of(jax.tree.map(lambda x: x[rows], batch), key_noise)
            sums = carry.progress.sums
            carry, metrics = step(_with_sums(carry, _NO_SUMS), minibatch, share)
            return (_with_sums(carry, dataclasses.replace(sums, whole=sums.whole + metrics.whole)), key), None

        # Shuffling row numbers instead of data avoids a second copy of the batch.
        minibatches = jnp.reshape(order, (self.settings.ppo.num_minibatches, -1))
        shares = masked.shares(batch.collected.valid, minibatches)
        (after, _), _ = jax.lax.scan(take_rows, (carry, key_loss), (minibatches, shares))
        progress, fallback = kl_limiter.close_epoch(after.skipped, carry.progress, fallback, after.progress)
        return after._replace(progress=progress, key=key), fallback

    def step(
        self,
        layout: ParamFlattener,
        statistics: Statistics,
        counters: Counters,
        carry: SGDCarry,
        minibatch: Minibatch,
        share: jax.Array | None,
    ) -> tuple[SGDCarry, PackedDict]:
        """Computes a candidate update, and applies it unless a guard or the KL limiter rejects it.

        `share` is the share of valid samples over all devices and may be 0; None without a mask.

        Returns:
            The next carry, with the same sums, and the metrics of the minibatch; zeros if the update is rejected,
            because its metrics may be NaN.
        """
        progress = carry.progress
        proposal = self._propose(layout, statistics, counters, carry, minibatch, share)
        candidate, metrics, judged = proposal.candidate, proposal.metrics, proposal.judged
        context = UpdateContext(
            (candidate.params, candidate.opt_state),
            proposal.gradient_norm,
            candidate.update_norm,
            candidate.parameter_norm,
        )
        (new_params, new_opt), ok, guard_state = fold(self.guards, context, carry.guard_state)
        limit = kl_limiter.limit(self.settings, proposal.tuning)
        updating, skipped, tuning = kl_limiter.check(carry.skipped, metrics, proposal.tuning, limit)
        ok = both(both(ok, proposal.usable), updating)
        if carry.skipped is not None:
            # If the distance is NaN, guards must see the update: one of them may know the cause.
            is_nan = (carry.skipped == 0) & jnp.isnan(metrics["training/policy_distance"])
            judged = both(judged, updating | is_nan)
        guard_state = select(judged, guard_state, carry.guard_state)
        packed = PackedDict.of(metrics)
        packed = dataclasses.replace(packed, whole=select(ok, packed.whole, jnp.zeros_like(packed.whole)))
        params, opt_state = select(ok, (new_params, new_opt), (progress.params, progress.opt_state))
        progress = SGDState(params, opt_state, progress.sums, progress.accepted + jnp.asarray(ok, jnp.int32))
        return SGDCarry(progress, tuning, guard_state, carry.key, skipped), packed

    def _propose(
        self,
        layout: ParamFlattener,
        statistics: Statistics,
        counters: Counters,
        carry: SGDCarry,
        minibatch: Minibatch,
        share: jax.Array | None,
    ) -> _Proposal:
        tuning, before, params = carry.tuning, carry.progress, layout.split(carry.progress.params)
        usable: Mask = True if share is None else share > 0
        divisor = None if share is None else jnp.where(usable, share, 1.0)
        gradients, metrics = self.gradient(params, statistics, minibatch, divisor, tuning)
        if self.optimizer.separate_rates:
            # While the policy is held, Adam's moments must not accumulate gradients: the first step after the hold
            # would be too long.
            held = tuning.policy_hold > 0
            gradients = {**gradients, "policy": jax.tree.map(lambda g: jnp.where(held, 0.0, g), gradients["policy"])}
        gradients = layout.join(gradients)
        norm = optax.global_norm(gradients)

        judged: Mask = True
        updating: Mask = True if carry.skipped is None else carry.skipped == 0
        loss_scale = self.precision.loss_scale
        if loss_scale is not None:
            finite = jnp.isfinite(norm)
            usable = both(usable, finite)
            judged = finite | (tuning.loss_scale <= loss_scale.floor)
            tuning = select(updating, adapt_loss_scale(tuning, finite, loss_scale), tuning)
        if self.settings.ppo.learning_rate_schedule == "adaptive_kl":
            adapted = adapt_to_kl(tuning, metrics["training/kl_mean"], self.settings.ppo)
            tuning = select(updating, adapted, tuning)
        # Schedules use the steps at the iteration's end: the first iteration of a warm-up must not have rate 0.
        env_steps = counters.env_steps + self.settings.env_steps_per_iteration
        rates = self.optimizer.rates(tuning, env_steps)
        clip_scale = tuning.clip_scale if self.settings.tightens else None
        candidate = self.optimizer.candidate(
            gradients, norm, before.opt_state, before.params, rates, clip_scale, layout
        )
        metrics |= {
            "training/grad_norm": norm,
            "training/update_norm": candidate.update_norm,
            "training/learning_rate": rates.policy,
        } | {f"limiters/{name}/active": active for name, active in candidate.activity.items()}
        if rates.value is not rates.policy:
            metrics["training/value_learning_rate"] = rates.value
        if loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        return _Proposal(candidate, norm, tuning, usable, judged, metrics)


def _with_sums(carry: SGDCarry, sums: PackedDict) -> SGDCarry:
    return carry._replace(progress=carry.progress._replace(sums=sums))
