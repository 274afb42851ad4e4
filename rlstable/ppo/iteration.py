"""One iteration of PPO: collect one batch of experience, then run all SGD epochs on it. Read this file first.

    collect -> batch guards -> rewards -> mirror image (`mirror_image`) -> normaliser
            -> epochs: shuffle -> minibatches: loss, gradient, candidate, update guards    (`sgd`)
            -> trust region -> metrics -> state guards

The env guards run inside `collect`. With `ppo.normalizer_update=after` the normaliser follows the epochs. Each site
runs its guards with one `fold`: bad samples are masked, bad updates leave the old parameters (`select`).

The same function runs on one device and on many: it is mapped over the `data` axis. Devices exchange only gradients,
statistics and counters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rlstable.device import sharding
from rlstable.device.packed import PackedDict
from rlstable.device.precision import Precision
from rlstable.device.reflection import Mirror
from rlstable.guards.base import Guard, GuardState, fold, initial_states
from rlstable.guards.batch import BatchContext
from rlstable.guards.state import StateContext, StateSiteGuard
from rlstable.ppo import reward
from rlstable.ppo.distance import ActionMoments
from rlstable.ppo.gradient import LossGradient, preprocess_batch
from rlstable.ppo.loss import Loss
from rlstable.ppo.metrics import iteration_metrics, state_report
from rlstable.ppo.mirror_image import with_mirror_image
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.optimizer import Optimizer
from rlstable.ppo.records import Batch, Collected, Minibatch
from rlstable.ppo.rollout import Rollout, TrainingEnv, collect
from rlstable.ppo.settings import Settings
from rlstable.ppo.sgd import SGD
from rlstable.ppo.state import Metrics, TrainState, Tuning
from rlstable.ppo.teacher import Teacher
from rlstable.ppo.trust_region import TrustRegion
from rlstable.ppo.value_units import ValueUnits


@dataclasses.dataclass(frozen=True)
class PPO:
    """The constants of an iteration, guards by name; `TrainState` holds everything that changes.

    `mirror` is the mirror of observations and actions; None without `ppo.symmetry`.
    """

    settings: Settings
    env: TrainingEnv
    networks: Networks
    optimizer: Optimizer
    precision: Precision
    batch_guards: Mapping[str, Guard]
    update_guards: Mapping[str, Guard]
    state_guards: Mapping[str, StateSiteGuard]
    mirror: Mirror | None = None
    teacher: Teacher | None = None

    def iteration(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Collects a batch, runs SGD, checks the new state and reports metrics.

        A pure function: the caller maps it over devices and compiles it.
        """
        trust_region = TrustRegion(self.settings, self.networks, self.optimizer)
        sgd = SGD(self.settings, self.optimizer, self.precision, self.update_guards, self.gradient)
        with self.precision.traced():
            key_sgd, key_rollout, key = jax.random.split(state.key, 3)
            state = trust_region.before_first_batch(state)
            with jax.named_scope("collect"):  # the profiler shows this name
                rollout = self.collect(state, sharding.device_key(key_rollout))
            guards = {**self.batch_guards, **self.update_guards, **self.state_guards}
            guard_state = initial_states(guards, state.guard_memory) | rollout.guard_state
            # Batch guards mark bad samples in `data.valid`, so the verdict's `ok` is not needed.
            data, _, guard_state = fold(self.batch_guards, BatchContext(rollout.data), guard_state)
            data, magnitudes, reward_range, reward_metrics = reward.shape(
                data,
                state.reward_magnitudes,
                state.tuning.reward_range,
                self.settings.ppo,
                self.settings.limits,
                functools.partial(self._expected_rewards, state, data),
            )
            tuning = dataclasses.replace(state.tuning, reward_range=reward_range)
            state = dataclasses.replace(state, tuning=tuning)
            value_units = ValueUnits(self.networks, self.objective(tuning))
            if self.mirror is not None:
                unrolls = self.settings.ppo.rows // self.settings.ppo.num_envs
                data = with_mirror_image(data, self.mirror, self.networks, state, unrolls)

            state, update = trust_region.before_sgd(state, data)
            statistics = value_units.before_sgd(state.params, update.statistics, data)
            reference = trust_region.reference(state, statistics, data)
            with jax.named_scope("learn"):
                batch = self._batch(state, statistics, data, reference)
                result = sgd.run(state, statistics, batch, guard_state, sharding.device_key(key_sgd))
                result, after, distance_metrics = trust_region.after_sgd(
                    sgd, state, update, statistics, data, reference, result
                )
            params, after = value_units.after_sgd(result.progress.params, after, data)
            opt_state = result.progress.opt_state

            values = iteration_metrics(self.settings, self.networks, state, statistics, data, result)
            values |= rollout.metrics | reward_metrics | distance_metrics
            context = StateContext(
                (params, opt_state, after),
                state_report(values, state.counters.iterations, state.normalizer.value, self.networks.action_size),
            )
            _, healthy, guard_state = fold(self.state_guards, context, result.guard_state)
            new_state = dataclasses.replace(
                state,
                params=params,
                opt_state=opt_state,
                normalizer=after,
                env_state=rollout.env_state,
                tuning=trust_region.next_tuning(result),
                key=key,
                reward_magnitudes=magnitudes,
                incident=rollout.incident,
            )
            return self._report(new_state, guard_state, result.progress.accepted, rollout.episodes, values, healthy)

    def collect(self, state: TrainState, key: jax.Array) -> Rollout:
        """Collects one batch of experience."""
        env, networks, settings = self.env, self.networks, self.settings
        return collect(state, key, env=env, networks=networks, settings=settings, teacher=self.teacher)

    def gradient(
        self,
        params: Params,
        statistics: Statistics,
        minibatch: Minibatch,
        valid_share: jax.Array | None,
        tuning: Tuning,
    ) -> tuple[Params, dict[str, jax.Array]]:
        """The gradient of the loss on a preprocessed minibatch over all devices, and its metrics."""
        return self.objective(tuning).gradient(params, statistics, minibatch, valid_share, tuning)

    def _expected_rewards(self, state: TrainState, data: Collected) -> jax.Array:
        data = preprocess_batch(self.networks, state.normalizer, data)
        return self.objective(state.tuning).expected_rewards(state.params, state.normalizer, data)

    def _batch(
        self, state: TrainState, statistics: Statistics, data: Collected, reference: ActionMoments | None
    ) -> Batch:
        """The batch for SGD: preprocessed experience, and targets if they are computed once per iteration."""
        data = preprocess_batch(self.networks, statistics, data)
        per_iteration = self.settings.ppo.gae == "per_iteration"
        targets = self.objective(state.tuning).targets(state.params, statistics, data) if per_iteration else None
        return Batch(data, targets, reference)

    def _report(
        self,
        state: TrainState,
        guard_state: dict[str, GuardState],
        accepted: jax.Array,
        episodes: jax.Array,
        values: dict[str, jax.Array],
        healthy: jax.Array | bool,
    ) -> tuple[TrainState, Metrics]:
        """The state with updated counters and guard memories, and the metrics."""
        per_device = {*self.env.guards, *self.batch_guards}
        trips = PackedDict.of(
            {name: sharding.total(s.trips) if name in per_device else s.trips for name, s in guard_state.items()}
        )
        counters = state.counters.after(self.settings.env_steps_per_iteration, accepted, episodes, trips)
        exhausted = {name: guard.exhausted(guard_state[name]) for name, guard in self.state_guards.items()}
        metrics = Metrics(PackedDict.of(values), trips, counters, jnp.asarray(healthy), PackedDict.of(exhausted))
        memory = {name: s.memory for name, s in guard_state.items()}
        return dataclasses.replace(state, guard_memory=memory, counters=counters), metrics

    def objective(self, tuning: Tuning) -> LossGradient:
        """The loss with the bounds that the tuning gives, for preprocessed batches."""
        values = reward.value_range(tuning.reward_range, self.settings.ppo, self.settings.limits)
        loss = Loss(self.networks.without_preprocessing, self.settings.ppo, self.settings.limits, values)
        return LossGradient(loss, self.precision.loss_scale is not None, self.settings.tightens)
