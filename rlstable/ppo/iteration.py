"""One iteration of PPO: collect one batch of experience, then run all SGD epochs on it. The page to read first.

    collect -> batch guards -> normaliser -> epochs: shuffle -> minibatches: loss, gradient, candidate, update guards
            -> state guards -> metrics

A site's guards are one `fold`; what a guard refuses, `select` keeps out. The same function runs on one device and on
many: it is mapped over the `data` axis, and only gradients, statistics and counters cross.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable import sharding
from rlstable.config import Config
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, fold, select
from rlstable.guards.batch import BatchContext
from rlstable.guards.state import StateContext, StateGuard
from rlstable.guards.update import UpdateContext
from rlstable.ppo import normalizer
from rlstable.ppo.loss import estimate, ppo_loss, standardize
from rlstable.ppo.networks import Networks
from rlstable.ppo.optimizer import Optimizer, adapt_loss_scale, adapt_to_kl
from rlstable.ppo.rollout import Collected, TrainingEnv, collect
from rlstable.ppo.state import Counters, Metrics, TrainState, Transition, Tuning
from rlstable.precision import Precision


@dataclasses.dataclass(frozen=True)
class PPO:
    """Everything an iteration is made of that does not change while it runs.

    Attributes:
        config: The whole configuration.
        env: Vectorised environments with the env site's guards.
        networks: Policy and value networks.
        optimizer: From gradients to candidates.
        precision: The level to compute in.
        batch_guards: Of the batch site, by name; likewise the next two.
    """

    config: Config
    env: TrainingEnv
    networks: Networks
    optimizer: Optimizer
    precision: Precision
    batch_guards: Mapping[str, Guard]
    update_guards: Mapping[str, Guard]
    state_guards: Mapping[str, StateGuard]

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects, learns, judges and reports. Pure; to be mapped over devices and compiled by the caller."""
        with self.precision.traced():
            key_sgd, key_rollout, key = jax.random.split(state.key, 3)
            rollout = collect(
                state, sharding.own_key(key_rollout), env=self.env, networks=self.networks, config=self.config
            )
            states = state.guard_state | rollout.guard_state
            data, _, states = fold(self.batch_guards, BatchContext(rollout.data), states)

            statistics = state.normalizer
            if self._updates_normalizer and self.config.ppo.updates_normalizer_first:
                statistics = normalizer.update(statistics, data.observation, data.valid, self.config.ppo)
            learned = self._learn(state, statistics, data, states, sharding.own_key(key_sgd))
            if self._updates_normalizer and not self.config.ppo.updates_normalizer_first:
                statistics = normalizer.update(statistics, data.observation, data.valid, self.config.ppo)

            judged = StateContext((learned.params, learned.opt_state, statistics))
            _, healthy, states = fold(self.state_guards, judged, learned.guard_state)
            rollout = rollout._replace(data=data)
            return self._finish(state, rollout, learned._replace(guard_state=states), statistics, key, healthy)

    def _learn(self, state: TrainState, statistics: Any, data: Transition, states: dict, key: jax.Array) -> Learning:
        """All epochs over one batch. Their number is traced, so that 0 measures collecting without another program."""
        if self.config.ppo.gae == "per_iteration":
            data = self._with_estimates(state.params, statistics, data)
        learning = Learning(state.params, state.opt_state, state.tuning, states, key, {}, jnp.zeros((), jnp.int32))
        rows = data.log_prob.shape[0] // self.config.ppo.num_minibatches

        def report() -> dict[str, jax.Array]:
            sample = _as_minibatch(jax.tree.map(lambda x: x[:rows], data), key)
            return self._minibatch(learning, statistics, sample, state.counters).sums

        reported = jax.eval_shape(report)
        learning = learning._replace(sums=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), reported))
        return jax.lax.fori_loop(
            0,
            state.tuning.epochs,
            lambda _, carry: self._epoch(carry, statistics, data, state.counters),
            learning,
        )

    def _epoch(self, learning: Learning, statistics: Any, data: Transition, counters: Counters) -> Learning:
        """Shuffles this device's unrolls and takes one step per minibatch."""
        key, key_shuffle, key_loss = jax.random.split(learning.key, 3)
        minibatches = jax.tree.map(lambda x: self._shuffled(key_shuffle, x), data)

        def step(carry: tuple[Learning, jax.Array], minibatch: Transition) -> tuple[tuple[Learning, jax.Array], None]:
            learning, key = carry
            key, key_noise = jax.random.split(key)
            minibatch = _as_minibatch(minibatch, key_noise)
            return (self._minibatch(learning, statistics, minibatch, counters), key), None

        (learning, _), _ = jax.lax.scan(step, (learning, key_loss), minibatches)
        return learning._replace(key=key)

    def _minibatch(self, learning: Learning, statistics: Any, data: Transition, counters: Counters) -> Learning:
        """One candidate update, and the verdict on it."""
        params, opt_state, tuning = learning.params, learning.opt_state, learning.tuning
        valid_share = masked.share(data.valid)
        gradients, metrics = self.gradient(params, statistics, data, valid_share, tuning.loss_scale)
        norm = optax.global_norm(gradients)

        learnable: jax.Array | bool = True if data.valid is None else masked.some(data.valid)
        searching: jax.Array | bool = False
        if self.precision.loss_scale is not None:
            finite = jnp.isfinite(norm)
            learnable &= finite
            searching = ~finite & (tuning.loss_scale > self.precision.loss_scale.floor)
            tuning = adapt_loss_scale(tuning, finite, self.precision.loss_scale)
        if self.config.ppo.learning_rate_schedule == "adaptive_kl":
            tuning = adapt_to_kl(tuning, metrics["training/kl_mean"], self.config.ppo)
        # At the iteration's end: a warm-up must not spend its first iteration at a rate of zero.
        reached = counters.env_steps + self.config.env_steps_per_iteration
        rate = self.optimizer.rate(tuning, reached.progress(self.config.total_steps))

        *candidate, update = self.optimizer.candidate(gradients, opt_state, params, rate)
        context = UpdateContext(tuple(candidate), gradients, norm, searching)
        (new_params, new_opt), ok, states = fold(self.update_guards, context, learning.guard_state)
        ok = learnable if ok is True else ok & learnable
        params, opt_state = select(ok, (new_params, new_opt), (params, opt_state))

        metrics |= self._update_metrics(norm, update, rate, tuning)
        accepted = jnp.asarray(1 if ok is True else ok, jnp.int32)
        sums = _add_where(ok, metrics, learning.sums)
        return Learning(params, opt_state, tuning, states, learning.key, sums, learning.accepted + accepted)

    def gradient(
        self,
        params: Any,
        statistics: Any,
        data: Transition,
        valid_share: jax.Array | None,
        loss_scale: jax.Array,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The gradient of the loss on a minibatch over all devices, and its metrics.

        With `ppo.gradient_accumulation` the minibatch is taken in parts; targets, normalisation, mask and noise span
        the whole of it, so that the mathematics is the same.

        Args:
            params: Network parameters.
            statistics: Observation statistics.
            data: `[T, B]`.
            valid_share: `masked.share(data.valid)`.
            loss_scale: Factor on the loss while it is differentiated; the gradient is divided by it.
        """
        scaled = self.precision.loss_scale is not None
        parts = self.config.ppo.gradient_accumulation

        def objective(params: Any, data: Transition) -> tuple[jax.Array, dict[str, jax.Array]]:
            loss, metrics = ppo_loss(
                params, statistics, data, valid_share,
                networks=self.networks, config=self.config.ppo, limits=self.config.guards.limiters,
            )  # fmt: skip
            return (loss * loss_scale if scaled else loss), metrics

        differentiate = jax.grad(objective, has_aux=True)
        if self.config.ppo.gae == "per_iteration" and self.config.ppo.normalize_advantage:
            data = data._replace(advantage=standardize(data.advantage, data.valid, valid_share))
        if parts == 1:
            gradients, metrics = differentiate(params, data)
        else:
            gradients, metrics = self._accumulate(differentiate, params, statistics, data, valid_share)
        gradients, metrics = sharding.mean((gradients, metrics))
        if scaled:
            gradients = jax.tree.map(lambda g: g / loss_scale, gradients)
        return gradients, metrics

    def _accumulate(
        self,
        differentiate: Any,
        params: Any,
        statistics: Any,
        data: Transition,
        valid_share: jax.Array | None,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The mean of the gradients of equal parts of a minibatch, one part in memory at a time."""
        parts = self.config.ppo.gradient_accumulation
        if data.target is None:
            data = self._with_minibatch_estimates(params, statistics, data, valid_share)
        split = jax.tree.map(lambda x: _split(x, parts, axis=1), data._replace(bootstrap_observation=None))
        split = split._replace(
            bootstrap_observation=jax.tree.map(lambda x: _split(x, parts, axis=0), data.bootstrap_observation)
        )

        def add(total: Any, part: Transition) -> tuple[Any, None]:
            return jax.tree.map(lambda a, b: a + b / parts, total, differentiate(params, part)), None

        first = jax.tree.map(lambda x: x[0], split)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, params, first))
        return jax.lax.scan(add, zeros, split)[0]

    def _with_minibatch_estimates(
        self, params: Any, statistics: Any, data: Transition, valid_share: jax.Array | None
    ) -> Transition:
        values = self.networks.value(params, statistics, data.observation)
        targets, advantages = estimate(self.networks, params, statistics, data, values, self.config.ppo)
        if self.config.ppo.normalize_advantage:
            advantages = standardize(advantages, data.valid, valid_share)
        return data._replace(target=targets, advantage=advantages)

    def _with_estimates(self, params: Any, statistics: Any, data: Transition) -> Transition:
        """Targets and advantages for the whole batch, from the value function that stood when it was collected."""
        unrolls = _time_first(data)
        values = self.networks.value(params, statistics, unrolls.observation)
        target, advantage = estimate(self.networks, params, statistics, unrolls, values, self.config.ppo)
        return data._replace(target=jnp.swapaxes(target, 0, 1), advantage=jnp.swapaxes(advantage, 0, 1))

    def _shuffled(self, key: jax.Array, x: jax.Array) -> jax.Array:
        x = jax.random.permutation(key, x)
        return jnp.reshape(x, (self.config.ppo.num_minibatches, -1, *x.shape[1:]))

    def _update_metrics(self, norm: jax.Array, update: Any, rate: jax.Array, tuning: Tuning) -> dict[str, jax.Array]:
        metrics = {
            "training/grad_norm": norm,
            "training/update_norm": optax.global_norm(update),
            "training/learning_rate": rate,
        }
        bound = self.optimizer.max_norm
        if bound is not None:
            metrics["limiters/gradient_norm/active"] = (~(norm <= bound)).astype(jnp.float32)
        if self.precision.loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        return metrics

    @property
    def _updates_normalizer(self) -> bool:
        return self.config.ppo.normalize_observations

    def _finish(
        self,
        state: TrainState,
        rollout: Collected,
        learned: Learning,
        statistics: Any,
        key: jax.Array,
        healthy: Any,
    ) -> tuple[TrainState, Metrics]:
        """Widens the counters and puts the report together."""
        states = {}
        trips = {}
        per_device = {*self.env.guards, *self.batch_guards}
        for name, guard_state in learned.guard_state.items():
            trips[name] = sharding.total(guard_state.trips) if name in per_device else guard_state.trips
            states[name] = guard_state._replace(trips=jnp.zeros_like(guard_state.trips))
        old = state.counters
        counters = Counters(
            env_steps=old.env_steps + self.config.env_steps_per_iteration,
            iterations=old.iterations + 1,
            updates=old.updates + learned.accepted,
            episodes=old.episodes + rollout.episodes,
            trips={name: old.trips[name] + trips[name] for name in old.trips},
        )
        values = {name: total / learned.accepted for name, total in learned.sums.items()}
        valid = rollout.data.valid
        if valid is not None:
            values["training/valid_share"] = sharding.mean(jnp.mean(valid.astype(jnp.float32)))
        values |= rollout.metrics | {
            "training/accepted_share": learned.accepted / (state.tuning.epochs * self.config.ppo.num_minibatches)
        }
        exhausted = jnp.zeros((), bool)
        for name, guard in self.state_guards.items():
            exhausted |= guard.exhausted(states[name])
        new_state = TrainState(
            learned.params, learned.opt_state, statistics, rollout.env_state, state.reset_pool, states,
            learned.tuning, key, counters,
        )  # fmt: skip
        return new_state, Metrics(values, trips, counters, jnp.asarray(healthy), exhausted)


class Learning(NamedTuple):
    """What minibatches hand to each other.

    Attributes:
        params: Network parameters.
        opt_state: Optimizer state.
        tuning: Numbers that a rejected update does not put back.
        guard_state: By guard.
        key: Random key of the next epoch.
        sums: Metrics, summed over accepted minibatches.
        accepted: int32, how many those are.
    """

    params: Any
    opt_state: Any
    tuning: Tuning
    guard_state: dict[str, GuardState]
    key: jax.Array
    sums: dict[str, jax.Array]
    accepted: jax.Array


def _time_first(data: Transition) -> Transition:
    """`[rows, T, ...]` to `[T, rows, ...]`, the bootstrap observation as it is."""
    swapped = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), data._replace(bootstrap_observation=None))
    return swapped._replace(bootstrap_observation=data.bootstrap_observation)


def _as_minibatch(data: Transition, key: jax.Array) -> Transition:
    """Rows as the loss takes them, with the entropy estimate's noise."""
    data = _time_first(data)
    return data._replace(noise=jax.random.normal(key, data.raw_action.shape))


def _split(x: jax.Array, parts: int, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], parts, x.shape[axis] // parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(jnp.reshape(x, shape), axis, 0)


def _add_where(ok: jax.Array | bool, metrics: dict[str, jax.Array], sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds the metrics of an accepted minibatch; those of a rejected one may be NaN."""
    if not sums:
        return metrics
    return {name: sums[name] + select(ok, value, jnp.zeros_like(value)) for name, value in metrics.items()}
