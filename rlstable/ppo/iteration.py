"""One iteration of PPO: collect one batch of experience, then run all SGD epochs on it. The page to read first.

    collect -> batch guards -> rewards -> normaliser
            -> epochs: shuffle -> minibatches: loss, gradient, candidate, update guards
            -> state guards -> metrics

A site's guards are one `fold`; what a guard refuses, `select` keeps out. The same function runs on one device and on
many: it is mapped over the `data` axis, and only gradients, statistics and counters cross.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlstable.config import Config
from rlstable.device import sharding
from rlstable.device.packed import PackedDict
from rlstable.device.precision import Precision
from rlstable.device.rarely import apply_if
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, awake, fold, select
from rlstable.guards.batch import BatchContext
from rlstable.guards.state import StateContext, StateSiteGuard
from rlstable.guards.update import UpdateContext
from rlstable.ppo import distance, kl_limiter, normalizer, reward
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.gradient import LossGradient, as_minibatch, prepared
from rlstable.ppo.metrics import report_of, values_of
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Optimizer, adapt_loss_scale, adapt_to_kl, held
from rlstable.ppo.rollout import Collected, TrainingEnv, collect
from rlstable.ppo.sgd_state import SGDCarry, SGDState, add_where
from rlstable.ppo.state import Counters, Metrics, TrainState, Transition, Tuning


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
    state_guards: Mapping[str, StateSiteGuard]

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects, learns, judges and reports. Pure; to be mapped over devices and compiled by the caller."""
        ppo, limits = self.config.ppo, self.config.guards.limiters
        with self.precision.traced():
            key_sgd, key_rollout, key = jax.random.split(state.key, 3)
            with jax.named_scope("collect"):  # by which profiles tell what is what
                rollout = self._collect(state, sharding.own_key(key_rollout))
            states = awake(self._judges, state.guard_memory) | rollout.guard_state
            data, _, states = fold(self.batch_guards, BatchContext(rollout.data), states)
            returns = reward.Returns(state.return_statistics, state.running_return)
            data, returns, shaping = reward.shape(data, returns, ppo, limits.reward)

            statistics = state.normalizer
            if ppo.normalize_observations and ppo.updates_normalizer_first:
                statistics = self._observed(state, state.params, data, collects=True)
            if ppo.normalize_values:
                readable = prepared(self.networks, statistics, data)
                statistics = self._objective.first_targets(state.params, statistics, readable)
            read = statistics
            data = self._with_reference(state, statistics, data)
            layout = ParamFlattener.of(state.params)
            with jax.named_scope("learn"):
                learned = self._learn(state, layout, statistics, data, states, sharding.own_key(key_sgd))
                if ppo.normalize_observations and not ppo.updates_normalizer_first:
                    statistics = self._observed(state, layout.split(learned.progress.params), data)
                learned, statistics, shift = self._closed(state, layout, statistics, data, learned)
            params = layout.split(learned.progress.params)
            opt_state = layout.split_in(learned.progress.opt_state, state.opt_state)
            if ppo.normalize_values:
                readable = prepared(self.networks, statistics, data)
                statistics, params = self._objective.follow_targets(params, statistics, readable)

            values = values_of(self.config, self.networks, state, read, data, learned) | rollout.metrics | shaping
            if shift is not None:
                values |= {"training/policy_distance": shift.mean, "training/policy_distance_p99": shift.p99}
            if limits.kl is not None and ppo.normalize_observations:
                left_out = normalizer.left_out(state.normalizer, statistics, data.reward, data.valid)
                values["limiters/normalizer/active"] = left_out
            joined = layout.join(params) if ppo.normalize_values else learned.progress.params
            kept = (joined, learned.progress.opt_state, (statistics, returns.statistics))
            judged = StateContext(kept, report_of(values, state.normalizer.value, self.networks.action_size))
            _, healthy, states = fold(self.state_guards, judged, learned.guard_state)
            tuning = kl_limiter.relax(learned.passed_over, learned.tuning)
            new_state = dataclasses.replace(
                state,
                params=params,
                opt_state=opt_state,
                normalizer=statistics,
                env_state=rollout.env_state,
                tuning=held(tuning) if self.optimizer.separate else tuning,
                key=key,
                return_statistics=returns.statistics,
                running_return=returns.running,
                incident=rollout.incident,
            )
            return self._finish(new_state, states, learned.progress.accepted, rollout.episodes, values, healthy)

    def _collect(self, state: TrainState, key: jax.Array) -> Collected:
        """One batch of experience."""
        return collect(state, key, env=self.env, networks=self.networks, config=self.config)

    def _learn(
        self, state: TrainState, layout: ParamFlattener, statistics: Any, data: Transition, states: dict, key: jax.Array
    ) -> SGDCarry:
        """All epochs over one batch. Their number is traced, so that 0 measures collecting without another program."""
        data = prepared(self.networks, statistics, data)
        if self.config.ppo.gae == "per_iteration":
            data = self._objective.with_estimates(state.params, statistics, data)
        none = jnp.zeros((), jnp.int32)
        passed_over = None if self.config.guards.limiters.kl is None else none
        start = self._start(state, layout)
        learning = SGDCarry(start, state.tuning, states, key, passed_over)
        # Traced once, for the shapes of its metrics and for the loop.
        gradient = jax.jit(lambda *args: self.gradient(*args), inline=True)
        minibatch = functools.partial(self._minibatch, gradient, layout, statistics, state.counters)
        rows = data.log_prob.shape[0] // self.config.ppo.num_minibatches

        def report() -> PackedDict:
            sample = as_minibatch(jax.tree.map(lambda x: x[:rows], data), key)
            return minibatch(learning, sample).progress.sums

        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(report))
        learning = learning._replace(progress=learning.progress._replace(sums=sums))
        learning, _ = jax.lax.fori_loop(
            0,
            state.tuning.epochs,
            lambda _, carry: self._epoch(carry[0], carry[1], data, minibatch),
            (learning, None if passed_over is None else learning.progress),
        )
        return learning

    def _epoch(
        self, learning: SGDCarry, proven: SGDState | None, data: Transition, take: Callable[..., SGDCarry]
    ) -> tuple[SGDCarry, SGDState | None]:
        """Shuffles this device's unrolls and takes one step per minibatch; `proven` is what to go back to."""
        key, key_shuffle, key_loss = jax.random.split(learning.key, 3)
        order = jax.random.permutation(key_shuffle, data.log_prob.shape[0])

        def step(carry: tuple[SGDCarry, jax.Array], rows: jax.Array) -> tuple[tuple[SGDCarry, jax.Array], None]:
            learning, key = carry
            key, key_noise = jax.random.split(key)
            minibatch = as_minibatch(jax.tree.map(lambda x: x[rows], data), key_noise)
            return (take(learning, minibatch), key), None

        # Only numbers are shuffled: the data lies still, and there is no second copy of it.
        minibatches = jnp.reshape(order, (self.config.ppo.num_minibatches, -1))
        (after, _), _ = jax.lax.scan(step, (learning, key_loss), minibatches)
        progress, proven = kl_limiter.settle(after.passed_over, learning.progress, proven, after.progress)
        return after._replace(progress=progress, key=key), proven

    def _minibatch(
        self,
        gradient: Callable[..., tuple[Any, dict[str, jax.Array]]],
        layout: ParamFlattener,
        statistics: Any,
        counters: Counters,
        learning: SGDCarry,
        data: Transition,
    ) -> SGDCarry:
        """One candidate update, and the verdict on it."""
        progress, tuning = learning.progress, learning.tuning
        params, opt_state = progress.params, progress.opt_state
        valid_share = masked.share(data.valid)
        by_layer, metrics = gradient(layout.split(params), statistics, data, valid_share, tuning)
        if self.optimizer.separate:
            # The moments of a policy that is held must not gather what it is to leap by afterwards.
            still = learning.tuning.policy_hold > 0
            by_layer = {**by_layer, "policy": jax.tree.map(lambda g: jnp.where(still, 0.0, g), by_layer["policy"])}
        gradients = layout.join(by_layer)
        norm = optax.global_norm(gradients)

        learnable: jax.Array | bool = True if data.valid is None else masked.some(data.valid)
        under_way = kl_limiter.still_updating(learning.passed_over)
        excused: jax.Array | bool = False
        if self.precision.loss_scale is not None:
            finite = jnp.isfinite(norm)
            learnable &= finite
            excused = ~finite & (tuning.loss_scale > self.precision.loss_scale.floor)
            tuning = select(under_way, adapt_loss_scale(tuning, finite, self.precision.loss_scale), tuning)
        if self.config.ppo.learning_rate_schedule == "adaptive_kl":
            adapted = adapt_to_kl(tuning, metrics["training/kl_mean"], self.config.ppo)
            tuning = select(under_way, adapted, tuning)
        # At the iteration's end: a warm-up must not spend its first iteration at a rate of zero.
        reached = counters.env_steps + self.config.env_steps_per_iteration
        rates = self.optimizer.rates(tuning, lambda: reached.progress(self.config.total_steps))

        clip_scale = tuning.clip_scale if self.config.tightens else None
        candidate = self.optimizer.candidate(gradients, norm, opt_state, params, rates, clip_scale, layout)
        context = UpdateContext(
            (candidate.params, candidate.opt_state), norm, candidate.update_norm, candidate.parameter_norm
        )
        (new_params, new_opt), ok, states = fold(self.update_guards, context, learning.guard_state)
        ok = learnable if ok is True else ok & learnable
        going, passed_over, tuning = kl_limiter.check(learning.passed_over, metrics, tuning, self._limit(tuning))
        if going is not True:
            # Where a distance is not even a number, a guard may be able to say why.
            excused |= ~going & ~(under_way & jnp.isnan(metrics["training/policy_distance"]))
            ok = going if ok is True else ok & going
        if excused is not False:
            # Rejected in any case, and nothing is wrong: guards neither count nor remember it.
            states = select(jnp.logical_not(excused), states, learning.guard_state)

        metrics |= {
            "training/grad_norm": norm,
            "training/update_norm": candidate.update_norm,
            "training/learning_rate": rates.policy,
        }
        if rates.value is not rates.policy:
            metrics["training/value_learning_rate"] = rates.value
        metrics |= {f"limiters/{name}/active": active for name, active in candidate.activity.items()}
        if self.precision.loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        params, opt_state = select(ok, (new_params, new_opt), (params, opt_state))
        progress = SGDState(
            params,
            opt_state,
            sums=add_where(ok, PackedDict.of(metrics), progress.sums),
            accepted=progress.accepted + jnp.asarray(1 if ok is True else ok, jnp.int32),
        )
        return SGDCarry(progress, tuning, states, learning.key, passed_over)

    def _with_reference(self, state: TrainState, statistics: Statistics, data: Transition) -> Transition:
        """Adds what the distance of the policy is measured from: the policy that collected.

        The first batch is read by statistics that have just come to be, and there is nothing learnt that they could
        harm: only there the reference is the policy under those.
        """
        guards = self.config.guards
        if guards.limiters.kl is None and not guards.policy.enabled:
            return data
        reference = distance.moments(data.distribution)
        if self.config.ppo.normalize_observations and statistics is not state.normalizer:

            def under_new(_: Any) -> Any:
                observation = masked.finite(data.observation, data.valid)
                return distance.moments(self.networks.distribution(state.params, statistics, observation)[0])

            reference = apply_if(state.normalizer.count == 0, under_new, reference)
        return data._replace(reference=reference)

    def _closed(
        self, state: TrainState, layout: ParamFlattener, statistics: Statistics, data: Transition, learned: SGDCarry
    ) -> tuple[SGDCarry, Statistics, distance.Shift | None]:
        """Measures how far the iteration moved the policy, and takes back what is beyond the KL limiter's bound.

        Statistics that were updated after SGD fit the parameters that SGD left, so they go back with them.
        """
        if data.reference is None:
            return learned, statistics, None
        sample, back = distance.sampled(data), statistics
        if self.config.ppo.normalize_observations and not self.config.ppo.updates_normalizer_first:
            sample = self._with_reference(state, statistics, sample)
            back = select(state.normalizer.count == 0, statistics, state.normalizer)
        limit, bound = self.config.guards.limiters.kl, self._limit(learned.tuning)

        def shift(progress: SGDState, statistics: Statistics) -> distance.Shift:
            params = layout.split(progress.params)
            return distance.shift(self.networks, params, statistics, sample, sample.reference, limit)

        found = shift(learned.progress, statistics)
        if learned.passed_over is None or bound is None:
            return learned, statistics, found
        minibatches = state.tuning.epochs * self.config.ppo.num_minibatches
        over, passed_over, tuning = kl_limiter.close_epoch(
            learned.passed_over, found.mean, learned.tuning, bound, minibatches
        )
        start = self._start(state, layout)
        start = start._replace(sums=jax.tree.map(jnp.zeros_like, learned.progress.sums))
        (progress, statistics), _, found = apply_if(
            over,
            lambda kept: (kept[1], kept[1], shift(*kept[1])),
            ((learned.progress, statistics), (start, back), found),
        )
        return learned._replace(progress=progress, passed_over=passed_over, tuning=tuning), statistics, found

    def _start(self, state: TrainState, layout: ParamFlattener) -> SGDState:
        """The parameters and the optimizer state before the first minibatch."""
        none = jnp.zeros((), jnp.int32)
        return SGDState(layout.join(state.params), layout.join_in(state.opt_state), PackedDict.of({}), none)

    def _limit(self, tuning: Tuning) -> jax.Array | float | None:
        """The bound of the policy's distance, as tight as a remedy has made it."""
        limit = self.config.guards.limiters.kl
        return limit if limit is None or not self.config.tightens else limit * tuning.clip_scale

    def _observed(self, state: TrainState, params: Any, data: Transition, collects: bool = False) -> Statistics:
        """The statistics after a batch, as near to the full update as the bound on the policy's distance allows.

        Args:
            state: With the statistics before.
            params: Of the policy.
            data: The batch.
            collects: Whether the batch was collected with these parameters and statistics.
        """
        statistics, limit = state.normalizer, self._limit(state.tuning)
        outlier = self.config.guards.limiters.observation_outlier
        new = normalizer.update(statistics, data.observation, data.valid, self.config.ppo, outlier)
        if self.optimizer.separate:
            # If the policy is held or slowed, SGD cannot undo what the normaliser's step does to the policy.
            pace = self.optimizer.policy_pace(state.tuning)
            slower = normalizer.blend(statistics, new, pace, self.config.ppo)
            new = select((pace >= 1.0) | (statistics.count == 0), new, slower)
        if limit is None:
            return new
        sample = distance.sampled(data)
        policy = sample.distribution
        if not collects:
            observation = masked.finite(sample.observation, sample.valid)
            policy = self.networks.distribution(params, statistics, observation)[0]
        before = distance.moments(policy)
        return distance.bounded(self.networks, params, statistics, new, sample, before, limit, self.config.ppo)

    def gradient(
        self,
        params: Any,
        statistics: Any,
        data: Transition,
        valid_share: jax.Array | None,
        tuning: Tuning,
    ) -> tuple[Any, dict[str, jax.Array]]:
        """The gradient of the loss on a prepared minibatch over all devices, and its metrics."""
        return self._objective.gradient(params, statistics, data, valid_share, tuning)

    @property
    def _objective(self) -> LossGradient:
        scaled = self.precision.loss_scale is not None
        return LossGradient(
            self.networks.bare, self.config.ppo, self.config.guards.limiters, scaled, self.config.tightens
        )

    def _finish(
        self,
        state: TrainState,
        guard_state: dict[str, GuardState],
        accepted: jax.Array,
        episodes: jax.Array,
        values: dict[str, jax.Array],
        healthy: Any,
    ) -> tuple[TrainState, Metrics]:
        """Widens the counters and puts the report together."""
        per_device = {*self.env.guards, *self.batch_guards}
        trips = {
            name: sharding.total(own.trips) if name in per_device else own.trips for name, own in guard_state.items()
        }
        tripped = PackedDict.of(trips)
        old = state.counters
        counters = Counters(
            env_steps=old.env_steps + self.config.env_steps_per_iteration,
            iterations=old.iterations + 1,
            updates=old.updates + accepted,
            episodes=old.episodes + episodes,
            trips=dataclasses.replace(old.trips, whole=old.trips.whole + tripped.whole),
        )
        exhausted = {name: guard.exhausted(guard_state[name]) for name, guard in self.state_guards.items()}
        memory = {name: own.memory for name, own in guard_state.items()}
        metrics = Metrics(PackedDict.of(values), tripped, counters, jnp.asarray(healthy), PackedDict.of(exhausted))
        return dataclasses.replace(state, guard_memory=memory, counters=counters), metrics

    @property
    def _judges(self) -> dict[str, Guard]:
        """The guards of every site but the environments', by name."""
        return {**self.batch_guards, **self.update_guards, **self.state_guards}
