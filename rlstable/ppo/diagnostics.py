"""Metrics of the loss: how far the policy moved, how good the value estimates are, which limiters were active."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.device import sharding
from rlstable.guards import limiters, masked
from rlstable.ppo.distance import distance, moments, sample_cap
from rlstable.ppo.loss import LossTerms
from rlstable.ppo.records import Minibatch

_EPSILON = 1e-8  # keeps divisors above 0
_MAX_KL = 1e6  # nats, largest KL of a sample in `training/kl_mean`


def loss_metrics(
    terms: LossTerms, minibatch: Minibatch, valid_share: jax.Array | None, limits: LimiterConfig
) -> dict[str, jax.Array]:
    """Metrics of this device's part of a minibatch `[T, B]`, to average over minibatches and devices.

    `valid_share` is the share of valid samples in the whole minibatch, a divisor above 0; None without a mask.
    """
    distribution, data = terms.distribution, minibatch.collected

    def mean(x: jax.Array) -> jax.Array:
        return masked.mean(x, data.valid, valid_share)

    metrics = {
        "training/total_loss": terms.loss,
        "training/policy_loss": terms.policy,
        "training/v_loss": terms.value,
        "training/entropy_loss": terms.entropy_loss,
        "training/entropy": terms.entropy,
        "training/kl_mean": mean(limiters.clip(distribution.kl_from(data.distribution), _MAX_KL)),
        "training/clip_fraction": mean(limiters.beyond(terms.ratio - 1.0, terms.epsilon)),
        "training/explained_variance": _explained_variance(terms.targets, terms.values, data.valid, valid_share),
        "training/policy_dist_mean_std": mean(jnp.mean(distribution.scale, axis=-1)),
        "training/policy_dist_min_std": masked.minimum(distribution.scale, data.valid),
        "training/policy_dist_max_std": masked.maximum(distribution.scale, data.valid),
    }
    if terms.imitation_error is not None:
        metrics["training/imitation_error"] = terms.imitation_error
    if limits.kl is not None and minibatch.reference is not None:
        moved = distance(minibatch.reference, moments(distribution))
        metrics["training/policy_distance"] = mean(jnp.minimum(moved, sample_cap(limits.kl)))
    active = terms.activity | _activity(terms, limits)
    return metrics | {f"limiters/{name}/active": mean(x) if x.ndim else x for name, x in active.items()}


def _activity(terms: LossTerms, limits: LimiterConfig) -> dict[str, jax.Array]:
    """Whether each sample is at the bound of a limiter, 1.0 or 0.0, by limiter; `advantage_std` is one scalar."""
    activity = {}
    if limits.log_ratio is not None:
        activity["log_ratio"] = limiters.beyond(terms.log_ratio, limits.log_ratio)
    if limits.advantage_std_min is not None and terms.advantage_std is not None:
        activity["advantage_std"] = limiters.outside(terms.advantage_std, limits.advantage_std_min, None)
    if limits.value_target is not None:
        activity["value_target"] = limiters.beyond(terms.raw_targets, limits.value_target)
    if limits.value_error is not None:
        activity["value_error"] = limiters.beyond(terms.value_error, limits.value_error)
    if terms.value_move is not None and terms.epsilon_value is not None:
        activity["value"] = limiters.beyond(terms.value_move, terms.epsilon_value)
    return activity


def _explained_variance(
    targets: jax.Array, values: jax.Array, valid: masked.Mask, valid_share: jax.Array | None
) -> jax.Array:
    """1 - Var(target - value) / Var(target): 1 for a perfect value function, 0 for a constant one."""
    center = sharding.mean(masked.mean(targets, valid, valid_share))
    error_center = sharding.mean(masked.mean(targets - values, valid, valid_share))
    variance = sharding.mean(masked.mean(jnp.square(targets - center), valid, valid_share))
    unexplained = sharding.mean(masked.mean(jnp.square(targets - values - error_center), valid, valid_share))
    return 1.0 - unexplained / jnp.maximum(variance, _EPSILON)
