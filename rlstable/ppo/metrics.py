"""Metrics of an iteration, and the metrics that the guards of the state site check."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstable.device import sharding
from rlstable.device.counter import WideCounter
from rlstable.guards import masked
from rlstable.guards.state import IterationStats
from rlstable.ppo import normalizer
from rlstable.ppo.networks import Networks
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected
from rlstable.ppo.settings import Settings
from rlstable.ppo.sgd import SGDCarry
from rlstable.ppo.state import TrainState


def iteration_metrics(
    settings: Settings,
    networks: Networks,
    state: TrainState,
    statistics: Statistics,
    data: Collected,
    sgd_result: SGDCarry,
) -> dict[str, jax.Array]:
    """Metrics of SGD, limiters and samples; means over accepted minibatches are NaN if none was accepted.

    `state` is the training state before the iteration, and `statistics` are those that SGD used.
    """
    limits, minibatches = settings.limits, settings.ppo.num_updates_per_batch * settings.ppo.num_minibatches
    share = masked.share(data.valid)

    def mean(x: jax.Array) -> jax.Array:
        return sharding.mean(masked.mean(x, data.valid, share))

    accepted, sums = sgd_result.progress.accepted, sgd_result.progress.sums
    values = dict(dataclasses.replace(sums, whole=sums.whole / accepted))
    values["training/accepted_share"] = accepted / minibatches
    if sgd_result.skipped is not None:
        values["limiters/kl/active"] = sgd_result.skipped / minibatches
        values["training/step_scale"] = sgd_result.tuning.step_scale
    if limits.observation_outlier is not None and settings.ppo.normalize_observations:
        outlier_share = normalizer.outlier_share(data.observation, state.normalizer, limits.observation_outlier)
        values["limiters/observation_outlier/active"] = mean(outlier_share)
    if limits.observation is not None:
        values["limiters/observation/active"] = mean(networks.beyond(statistics, data.observation, limits.observation))
    if networks.config.distribution_type == "normal":
        values["training/action_size"] = jnp.sqrt(mean(jnp.mean(jnp.square(data.raw_action), axis=-1)))
    if data.valid is not None:
        values["training/valid_share"] = sharding.mean(jnp.mean(data.valid.astype(jnp.float32)))
    return values


def state_report(
    values: dict[str, jax.Array], iterations: WideCounter, targets: Statistics | None, action_size: int
) -> IterationStats:
    """Metrics for the state site; `targets` are the statistics of value targets, None if values are not normalised."""
    return IterationStats(
        iterations=iterations.to_float(),
        valid_share=values.get("training/valid_share", jnp.ones(())),
        updated=values["training/accepted_share"] > 0,
        greatest_reward=values["training/reward_greatest"],
        # In units of rewards, also with normalised values.
        value_loss=values["training/v_loss"] * (1.0 if targets is None else jnp.square(targets.std)),
        distance=values.get("training/policy_distance", jnp.zeros(())),
        std=values["training/policy_dist_mean_std"],
        entropy=values["training/entropy"] / action_size,
    )
