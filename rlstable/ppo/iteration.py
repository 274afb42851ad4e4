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

from rlstable import sharding
from rlstable.config import Config
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, awake, fold, select
from rlstable.guards.batch import BatchContext
from rlstable.guards.state import StateContext, StateSiteGuard
from rlstable.guards.update import UpdateContext
from rlstable.packed import Packed
from rlstable.ppo import normalizer, overshoot, reward
from rlstable.ppo.flat import Layout
from rlstable.ppo.gradient import Objective, as_minibatch, prepared
from rlstable.ppo.learning import Learning, Progress, add_where
from rlstable.ppo.metrics import report_of, values_of
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
                statistics = self._observed(statistics, data)
            read = statistics
            layout = Layout.of(state.params)
            with jax.named_scope("learn"):
                learned = self._learn(state, layout, statistics, data, states, sharding.own_key(key_sgd))
            params = layout.split(learned.progress.params)
            opt_state = layout.split_in(learned.progress.opt_state, state.opt_state)
            if ppo.normalize_observations and not ppo.updates_normalizer_first:
                statistics = self._observed(statistics, data)
            if ppo.normalize_values:
                readable = prepared(self.networks, statistics, data)
                statistics, params = self._objective.follow_targets(params, statistics, readable)

            values = values_of(self.config, self.networks, state, read, data, learned) | rollout.metrics | shaping
            joined = layout.join(params) if ppo.normalize_values else learned.progress.params
            kept = (joined, learned.progress.opt_state, (statistics, returns.statistics))
            judged = StateContext(kept, report_of(values, state.normalizer.value, self.networks.action_size))
            _, healthy, states = fold(self.state_guards, judged, learned.guard_state)
            new_state = dataclasses.replace(
                state,
                params=params,
                opt_state=opt_state,
                normalizer=statistics,
                env_state=rollout.env_state,
                tuning=overshoot.recover(learned.passed_over, learned.tuning),
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
        self, state: TrainState, layout: Layout, statistics: Any, data: Transition, states: dict, key: jax.Array
    ) -> Learning:
        """All epochs over one batch. Their number is traced, so that 0 measures collecting without another program."""
        data = prepared(self.networks, statistics, data)
        if self.config.ppo.gae == "per_iteration":
            data = self._objective.with_estimates(state.params, statistics, data)
        data = self._with_reference(state, statistics, data)
        none = jnp.zeros((), jnp.int32)
        passed_over = None if self.config.guards.limiters.kl is None else none
        start = Progress(layout.join(state.params), layout.join_in(state.opt_state), Packed.of({}), none)
        learning = Learning(start, state.tuning, states, key, passed_over)
        # Traced once, for the shapes of its metrics and for the loop.
        gradient = jax.jit(lambda *args: self.gradient(*args), inline=True)
        minibatch = functools.partial(self._minibatch, gradient, layout, statistics, state.counters)
        rows = data.log_prob.shape[0] // self.config.ppo.num_minibatches

        def report() -> Packed:
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
        self, learning: Learning, proven: Progress | None, data: Transition, take: Callable[..., Learning]
    ) -> tuple[Learning, Progress | None]:
        """Shuffles this device's unrolls and takes one step per minibatch; `proven` is what to go back to."""
        key, key_shuffle, key_loss = jax.random.split(learning.key, 3)
        order = jax.random.permutation(key_shuffle, data.log_prob.shape[0])

        def step(carry: tuple[Learning, jax.Array], rows: jax.Array) -> tuple[tuple[Learning, jax.Array], None]:
            learning, key = carry
            key, key_noise = jax.random.split(key)
            minibatch = as_minibatch(jax.tree.map(lambda x: x[rows], data), key_noise)
            return (take(learning, minibatch), key), None

        # Only numbers are shuffled: the data lies still, and there is no second copy of it.
        minibatches = jnp.reshape(order, (self.config.ppo.num_minibatches, -1))
        (after, _), _ = jax.lax.scan(step, (learning, key_loss), minibatches)
        progress, proven = overshoot.settle(after.passed_over, learning.progress, proven, after.progress)
        return after._replace(progress=progress, key=key), proven

    def _minibatch(
        self,
        gradient: Callable[..., tuple[Any, dict[str, jax.Array]]],
        layout: Layout,
        statistics: Any,
        counters: Counters,
        learning: Learning,
        data: Transition,
    ) -> Learning:
        """One candidate update, and the verdict on it."""
        progress, tuning = learning.progress, learning.tuning
        params, opt_state = progress.params, progress.opt_state
        valid_share = masked.share(data.valid)
        by_layer, metrics = gradient(layout.split(params), statistics, data, valid_share, tuning)
        gradients = layout.join(by_layer)
        norm = optax.global_norm(gradients)

        learnable: jax.Array | bool = True if data.valid is None else masked.some(data.valid)
        under_way = overshoot.under_way(learning.passed_over)
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
        rate = self.optimizer.rate(tuning, lambda: reached.progress(self.config.total_steps))

        clip_scale = tuning.clip_scale if self.config.tightens else None
        candidate = self.optimizer.candidate(gradients, norm, opt_state, params, rate, clip_scale, layout)
        context = UpdateContext(
            (candidate.params, candidate.opt_state), norm, candidate.update_norm, candidate.parameter_norm
        )
        (new_params, new_opt), ok, states = fold(self.update_guards, context, learning.guard_state)
        ok = learnable if ok is True else ok & learnable
        going, passed_over, tuning = overshoot.judge(
            learning.passed_over, metrics, tuning, self.config.guards.limiters.kl
        )
        if going is not True:
            # Where a KL is not even a number, a guard may be able to say why.
            excused |= ~going & ~(under_way & jnp.isnan(metrics["training/kl_update"]))
            ok = going if ok is True else ok & going
        if excused is not False:
            # Rejected in any case, and nothing is wrong: guards neither count nor remember it.
            states = select(jnp.logical_not(excused), states, learning.guard_state)

        metrics |= {
            "training/grad_norm": norm,
            "training/update_norm": candidate.update_norm,
            "training/learning_rate": rate,
        }
        metrics |= {f"limiters/{name}/active": active for name, active in candidate.activity.items()}
        if self.precision.loss_scale is not None:
            metrics["training/loss_scale"] = tuning.loss_scale
        params, opt_state = select(ok, (new_params, new_opt), (params, opt_state))
        progress = Progress(
            params,
            opt_state,
            sums=add_where(ok, Packed.of(metrics), progress.sums),
            accepted=progress.accepted + jnp.asarray(1 if ok is True else ok, jnp.int32),
        )
        return Learning(progress, tuning, states, learning.key, passed_over)

    def _with_reference(self, state: TrainState, statistics: Any, data: Transition) -> Transition:
        """Adds the policy as it is when SGD starts; with a normaliser that has just moved it is not the collecting one.

        The KL from there is that of the updates alone.
        """
        asked = self.config.guards.limiters.kl is not None or self.config.guards.policy.enabled
        if not asked or statistics is state.normalizer:
            return data

        def policy(observation: Any) -> Any:
            return self.networks.bare.distribution(state.params, statistics, observation)[0]

        parts, rows = self._objective.parts_of_batch, data.log_prob.shape[0]
        if parts == 1:
            return data._replace(reference=policy(data.observation))
        return data._replace(reference=jax.lax.map(policy, data.observation, batch_size=rows // parts))

    def _observed(self, statistics: Any, data: Transition) -> Any:
        outlier = self.config.guards.limiters.observation_outlier
        return normalizer.update(statistics, data.observation, data.valid, self.config.ppo, outlier)

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
    def _objective(self) -> Objective:
        scaled = self.precision.loss_scale is not None
        return Objective(self.networks.bare, self.config.ppo, self.config.guards.limiters, scaled, self.config.tightens)

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
        tripped = Packed.of(trips)
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
        metrics = Metrics(Packed.of(values), tripped, counters, jnp.asarray(healthy), Packed.of(exhausted))
        return dataclasses.replace(state, guard_memory=memory, counters=counters), metrics

    @property
    def _judges(self) -> dict[str, Guard]:
        """The guards of every site but the environments', by name."""
        return {**self.batch_guards, **self.update_guards, **self.state_guards}
