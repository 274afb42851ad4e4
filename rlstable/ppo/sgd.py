"""The SGD epochs of an iteration: shuffle, then for each minibatch gradient, candidate, update guards, select."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable.config import Config
from rlstable.device.packed import PackedDict
from rlstable.device.precision import Precision
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, fold, select
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


class SGDState(NamedTuple):
    """Parameters and metrics of SGD so far.

    Attributes:
        params: Network parameters, as a vector where `ParamFlattener` joins them.
        opt_state: Optimizer state, moments likewise.
        sums: Metrics, summed over accepted minibatches.
        accepted: int32, number of accepted minibatches.
    """

    params: Any
    opt_state: Any
    sums: PackedDict
    accepted: jax.Array


class SGDCarry(NamedTuple):
    """State that one minibatch hands to the next.

    Attributes:
        progress: Parameters and metrics so far.
        tuning: Numbers that a rejected update does not put back.
        guard_state: By guard.
        key: Random key of the next epoch.
        passed_over: int32, minibatches since the policy moved too far; None without the KL limiter.
    """

    progress: SGDState
    tuning: Tuning
    guard_state: dict[str, GuardState]
    key: jax.Array
    passed_over: jax.Array | None


class _Step(NamedTuple):
    """One candidate update before its verdict.

    Attributes:
        candidate: New parameters and optimizer state.
        gradient_norm: Over all layers.
        rates: Learning rates of the candidate.
        tuning: After the loss scale and the adaptive rate have seen the minibatch.
        learnable: Whether the minibatch has valid samples and, in float16, finite gradients.
        excused: Whether a rejection is no sign of trouble: guards neither count nor remember it.
        metrics: Of the loss.
    """

    candidate: Candidate
    gradient_norm: jax.Array
    rates: Rates
    tuning: Tuning
    learnable: Mask
    excused: Mask
    metrics: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class SGD:
    """Epochs and minibatches of one iteration.

    Attributes:
        config: The whole configuration.
        optimizer: From gradients to candidates.
        precision: For its loss scale.
        guards: Of the update site, by name.
        gradient: Gradient of the loss on a minibatch over all devices, and its metrics.
        flattener: Joins small networks into one vector while SGD runs.
    """

    config: Config
    optimizer: Optimizer
    precision: Precision
    guards: Mapping[str, Guard]
    gradient: Gradient
    flattener: ParamFlattener

    def start(self, state: TrainState) -> SGDState:
        """Parameters and optimizer state before the first minibatch."""
        none = jnp.zeros((), jnp.int32)
        flat = self.flattener
        return SGDState(flat.join(state.params), flat.join_in(state.opt_state), PackedDict.of({}), none)

    def params(self, progress: SGDState) -> Params:
        """The network parameters by layer."""
        return self.flattener.split(progress.params)

    def opt_state(self, progress: SGDState, like: Any) -> Any:
        """The optimizer state by layer; `like` is the one before SGD."""
        return self.flattener.split_in(progress.opt_state, like)

    def run(
        self,
        state: TrainState,
        statistics: Statistics,
        batch: Batch,
        guard_state: dict[str, GuardState],
        key: jax.Array,
    ) -> SGDCarry:
        """All epochs over one batch. Their number is traced, so 0 epochs measure collecting without another program."""
        none = jnp.zeros((), jnp.int32)
        passed_over = None if self.config.guards.limiters.kl is None else none
        carry = SGDCarry(self.start(state), state.tuning, guard_state, key, passed_over)
        # Traced once, for the shapes of its metrics and for the loop.
        gradient = jax.jit(lambda *args: self.gradient(*args), inline=True)
        traced_once = dataclasses.replace(self, gradient=gradient)
        rows = batch.collected.log_prob.shape[0] // self.config.ppo.num_minibatches

        def step(carry: SGDCarry, minibatch: Minibatch) -> SGDCarry:
            return traced_once.step(statistics, state.counters, carry, minibatch)

        def metrics() -> PackedDict:
            sample = Minibatch.of(jax.tree.map(lambda x: x[:rows], batch), key)
            return step(carry, sample).progress.sums

        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(metrics))
        carry = carry._replace(progress=carry.progress._replace(sums=sums))
        carry, _ = jax.lax.fori_loop(
            0,
            state.tuning.epochs,
            lambda _, carried: self._epoch(carried[0], carried[1], batch, step),
            (carry, None if passed_over is None else carry.progress),
        )
        return carry

    def _epoch(
        self,
        carry: SGDCarry,
        proven: SGDState | None,
        batch: Batch,
        step: Callable[[SGDCarry, Minibatch], SGDCarry],
    ) -> tuple[SGDCarry, SGDState | None]:
        """Shuffles this device's unrolls and takes one step per minibatch; `proven` is what to go back to."""
        key, key_shuffle, key_loss = jax.random.split(carry.key, 3)
        order = jax.random.permutation(key_shuffle, batch.collected.log_prob.shape[0])

        def scanned(carried: tuple[SGDCarry, jax.Array], rows: jax.Array) -> tuple[tuple[SGDCarry, jax.Array], None]:
            carry, key = carried
            key, key_noise = jax.random.split(key)
            minibatch = Minibatch.of(jax.tree.map(lambda x: x[rows], batch), key_noise)
            return (step(carry, minibatch), key), None

        # Row numbers are shuffled, not the data, so there is no second copy of the batch.
        minibatches = jnp.reshape(order, (self.config.ppo.num_minibatches, -1))
        (after, _), _ = jax.lax.scan(scanned, (carry, key_loss), minibatches)
        progress, proven = kl_limiter.settle(after.passed_over, carry.progress, proven, after.progress)
        return after._replace(progress=progress, key=key), proven

    def step(self, statistics: Statistics, counters: Counters, carry: SGDCarry, minibatch: Minibatch) -> SGDCarry:
        """One candidate update and the verdict on it."""
        progress = carry.progress
        proposed = self._propose(statistics, counters, carry, minibatch)
        candidate, metrics, excused = proposed.candidate, proposed.metrics, proposed.excused
        context = UpdateContext(
            (candidate.params, candidate.opt_state),
            proposed.gradient_norm,
            candidate.update_norm,
            candidate.parameter_norm,
        )
        (new_params, new_opt), ok, guard_state = fold(self.guards, context, carry.guard_state)
        ok = proposed.learnable if ok is True else ok & proposed.learnable
        limit = kl_limiter.limit(self.config, proposed.tuning)
        updating, passed_over, tuning = kl_limiter.check(carry.passed_over, metrics, proposed.tuning, limit)
        if updating is not True:
            # If a distance is not even a number, a guard may be able to say why.
            unknown = kl_limiter.still_updating(carry.passed_over) & jnp.isnan(metrics["training/policy_distance"])
            excused |= ~updating & ~unknown
            ok = updating if ok is True else ok & updating
        if excused is not False:
            guard_state = select(jnp.logical_not(excused), guard_state, carry.guard_state)
        metrics |= self._metrics(proposed, tuning)
        params, opt_state = select(ok, (new_params, new_opt), (progress.params, progress.opt_state))
        progress = SGDState(
            params,
            opt_state,
            sums=_add_where(ok, PackedDict.of(metrics), progress.sums),
            accepted=progress.accepted + jnp.asarray(1 if ok is True else ok, jnp.int32),
        )
        return SGDCarry(progress, tuning, guard_state, carry.key, passed_over)

    def _propose(self, statistics: Statistics, counters: Counters, carry: SGDCarry, minibatch: Minibatch) -> _Step:
        """The candidate update of a minibatch, and the tuning after the minibatch."""
        tuning, valid = carry.tuning, minibatch.collected.valid
        by_layer, metrics = self.gradient(
            self.params(carry.progress), statistics, minibatch, masked.share(valid), tuning
        )
        if self.optimizer.separate:
            # The moments of a held policy must not gather what the policy would leap by afterwards.
            held = tuning.policy_hold > 0
            by_layer = {**by_layer, "policy": jax.tree.map(lambda g: jnp.where(held, 0.0, g), by_layer["policy"])}
        gradients = self.flattener.join(by_layer)
        norm = optax.global_norm(gradients)

        learnable: Mask = True if valid is None else masked.any_valid(valid)
        excused: Mask = False
        updating = kl_limiter.still_updating(carry.passed_over)
        if self.precision.loss_scale is not None:
            finite = jnp.isfinite(norm)
            learnable &= finite
            excused = ~finite & (tuning.loss_scale > self.precision.loss_scale.floor)
            tuning = select(updating, adapt_loss_scale(tuning, finite, self.precision.loss_scale), tuning)
        if self.config.ppo.learning_rate_schedule == "adaptive_kl":
            adapted = adapt_to_kl(tuning, metrics["training/kl_mean"], self.config.ppo)
            tuning = select(updating, adapted, tuning)
        # Progress at the iteration's end: a warm-up must not spend its first iteration at a rate of zero.
        reached = counters.env_steps + self.config.env_steps_per_iteration
        rates = self.optimizer.rates(tuning, lambda: reached.progress(self.config.total_steps))
        clip_scale = tuning.clip_scale if self.config.may_tighten_clipping else None
        before = carry.progress
        candidate = self.optimizer.candidate(
            gradients, norm, before.opt_state, before.params, rates, clip_scale, self.flattener
        )
        return _Step(candidate, norm, rates, tuning, learnable, excused, metrics)

    def _metrics(self, proposed: _Step, tuning: Tuning) -> dict[str, jax.Array]:
        """Metrics of a step besides those of the loss."""
        candidate, rates = proposed.candidate, proposed.rates
        metrics = {
            "training/grad_norm": proposed.gradient_norm,
            "training/update_norm": candidate.update_norm,
            "training/learning_rate": rates.policy,
        }
        if rates.value is not rates.policy:
            metrics["training/value_learning_rate"] = rates.value
        metrics |= {f"limiters/{name}/active": active for name, active in candidate.activity.items()}
        if self.precision.loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        return metrics


def _add_where(ok: Mask, metrics: PackedDict, sums: PackedDict) -> PackedDict:
    """Adds the metrics of an accepted minibatch; metrics of a rejected one may be NaN."""
    if not sums:
        return metrics
    return dataclasses.replace(sums, whole=sums.whole + select(ok, metrics.whole, jnp.zeros_like(metrics.whole)))
