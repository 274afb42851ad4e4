"""The PPO loss: clipped surrogate, value error, entropy. Term by term that of Brax, with a mask and limiters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.device import sharding
from rlstable.guards import limiters, masked
from rlstable.ppo import gae
from rlstable.ppo.distance import distance, moments, sample_cap
from rlstable.ppo.distributions import Normal
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected, Minibatch, Targets

_EPSILON = 1e-8  # Brax's, beside the standard deviation of the advantages
_GREATEST_KL = 1e6


def estimate(
    networks: Networks,
    params: Params,
    statistics: Statistics,
    data: Collected,
    values: jax.Array,
    config: PPOConfig,
) -> Targets:
    """Value targets and raw advantages of unrolls, `[T, B]` each, without gradient."""
    targets, advantages = gae.estimate(
        rewards=data.reward,
        values=jax.lax.stop_gradient(values),
        bootstrap_value=jax.lax.stop_gradient(networks.value(params, statistics, data.bootstrap_observation)),
        truncation=data.truncation,
        termination=data.termination,
        discount=config.discounting,
        lambda_=config.gae_lambda,
    )
    return Targets(targets, advantages)


def standardize(
    advantages: jax.Array, valid: masked.Mask, valid_share: jax.Array | None, least_std: float | None
) -> tuple[jax.Array, jax.Array]:
    """Advantages with mean 0 and standard deviation 1 over the valid samples of all devices, and that deviation.

    Args:
        advantages: Raw.
        valid: Their mask.
        valid_share: `masked.share` of the whole minibatch.
        least_std: Floor of what is divided by, without which rounding errors become advantages; None for none.
    """
    center, std = masked.mean_and_std(advantages, valid, valid_share)
    return (advantages - center) / (limiters.floor(std, least_std) + _EPSILON), std


def ppo_loss(
    params: Params,
    statistics: Statistics,
    minibatch: Minibatch,
    valid_share: jax.Array | None,
    *,
    networks: Networks,
    config: PPOConfig,
    limits: LimiterConfig,
    clip_scale: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss on a minibatch and what it knows about itself.

    Averaged over devices the loss is the mean over the valid samples of the whole minibatch, and its gradient likewise.

    Args:
        params: Policy and value parameters.
        statistics: Observation statistics.
        minibatch: `[T, B]`, with preprocessed observations, which are finite where samples are invalid too. Targets
            are used as given, or estimated if there are none.
        valid_share: `masked.share` of the whole minibatch, or None.
        networks: The networks, for prepared observations (`Networks.without_preprocessing`).
        config: Hyperparameters.
        limits: Bounds.
        clip_scale: A factor on the clipping of ratio and value; None for none.

    Returns:
        The loss, and metrics that average over minibatches and devices.
    """
    data = minibatch.collected
    distribution, activity = networks.distribution(params, statistics, data.observation)
    values = networks.value(params, statistics, data.observation)
    (raw_targets, advantages), std = _targets_and_advantages(
        networks, params, statistics, minibatch, valid_share, values, config, limits
    )
    targets = limiters.clip(raw_targets, limits.value_target)
    raw_action, old_value = masked.kept((data.raw_action, data.value), data.valid)

    def mean(x: jax.Array) -> jax.Array:
        return masked.mean(x, data.valid, valid_share)

    log_ratio = masked.kept(distribution.log_prob(raw_action) - data.log_prob, data.valid)
    ratio = limiters.ratio(log_ratio, limits.log_ratio)
    epsilon = _times(config.clipping_epsilon, clip_scale)
    policy_loss = -mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages))

    # In units of the targets' own standard deviation, where those are normalised.
    unit = None if statistics.value is None else statistics.value.std
    epsilon_value = _times(config.clipping_epsilon_value, clip_scale)
    error, value_error = _value_error(values, old_value, targets, unit, epsilon_value, limits.value_error)
    value_loss = mean(value_error) * 0.5 * config.vf_loss_coefficient

    entropy = mean(distribution.entropy(minibatch.noise))
    entropy_loss = -config.entropy_cost * entropy
    loss = policy_loss + value_loss + entropy_loss

    known = jax.lax.stop_gradient((distribution, values, ratio, log_ratio))
    terms = _Terms(*known, epsilon, raw_targets, targets, std, old_value, unit, error, epsilon_value)
    metrics = {
        "training/total_loss": loss,
        "training/policy_loss": policy_loss,
        "training/v_loss": value_loss,
        "training/entropy_loss": entropy_loss,
        "training/entropy": entropy,
        **_measures(terms, minibatch, valid_share, limits.kl),
    }
    activity |= _activity(terms, limits)
    metrics |= {f"limiters/{name}/active": mean(active) if active.ndim else active for name, active in activity.items()}
    return loss, metrics


class _Terms(NamedTuple):
    """Intermediate results of the loss, for its metrics.

    Attributes:
        distribution: The policy's; this and the next three without gradient.
        values: Of the value network.
        ratio: New probability over old, limited.
        log_ratio: Its logarithm before the limiter.
        epsilon: Clipping of the ratio.
        raw_targets: Of values, before the limiter.
        targets: After it.
        std: Of the advantages; None where they are not normalised.
        old_value: Of the collecting network; None where nothing asks for it.
        unit: What value errors are measured in; None for 1.
        error: Of the values, in units.
        epsilon_value: Clipping of the values, in units; None for none.
    """

    distribution: Normal
    values: jax.Array
    ratio: jax.Array
    log_ratio: jax.Array
    epsilon: Any
    raw_targets: jax.Array
    targets: jax.Array
    std: jax.Array | None
    old_value: Any
    unit: jax.Array | None
    error: jax.Array
    epsilon_value: Any


def _targets_and_advantages(
    networks: Networks,
    params: Params,
    statistics: Statistics,
    minibatch: Minibatch,
    valid_share: jax.Array | None,
    values: jax.Array,
    config: PPOConfig,
    limits: LimiterConfig,
) -> tuple[Targets, jax.Array | None]:
    """The minibatch's targets, or targets estimated from values; and the standard deviation of the advantages."""
    data, targets, std = minibatch.collected, minibatch.targets, minibatch.advantage_std
    if targets is None:
        targets = estimate(networks, params, statistics, data, values, config)
        if config.normalize_advantage:
            advantage, std = standardize(targets.advantage, data.valid, valid_share, limits.advantage_std_min)
            targets = targets._replace(advantage=advantage)
    return masked.kept(targets, data.valid), std


def _value_error(
    values: jax.Array, old_value: Any, targets: jax.Array, unit: Any, epsilon: Any, greatest: float | None
) -> tuple[jax.Array, jax.Array]:
    """The error of values in units, and its square; where values are clipped, the larger one of that and the clipped.

    Args:
        values: Of the value network.
        old_value: Of the collecting network.
        targets: What they should be.
        unit: What errors are measured in; None for 1.
        epsilon: Clipping of the values, in units; None for none.
        greatest: From where on the square is Huber's line; None for nowhere.
    """
    error = _over(targets - values, unit)
    squared = limiters.squared(error, greatest)
    if epsilon is None:
        return error, squared
    moved = limiters.clip(_over(values - old_value, unit), epsilon)
    clipped = _over(targets - old_value, unit) - moved
    return error, jnp.maximum(squared, limiters.squared(clipped, greatest))


def _measures(
    terms: _Terms, minibatch: Minibatch, valid_share: jax.Array | None, greatest_kl: float | None
) -> dict[str, jax.Array]:
    """How far the policy has moved and how good the values are; `greatest_kl` is the limiter's bound."""
    distribution, data = terms.distribution, minibatch.collected

    def mean(x: jax.Array) -> jax.Array:
        return masked.mean(x, data.valid, valid_share)

    metrics = {
        "training/kl_mean": mean(_kl(data.distribution, distribution, _GREATEST_KL)),
        "training/clip_fraction": mean(limiters.beyond(terms.ratio - 1.0, terms.epsilon)),
        "training/explained_variance": _explained_variance(terms.targets, terms.values, data.valid, valid_share),
        "training/policy_dist_mean_std": mean(jnp.mean(distribution.scale, axis=-1)),
        "training/policy_dist_min_std": masked.least(distribution.scale, data.valid),
        "training/policy_dist_max_std": masked.greatest(distribution.scale, data.valid),
    }
    if greatest_kl is not None and minibatch.reference is not None:
        moved = distance(minibatch.reference, moments(distribution))
        metrics["training/policy_distance"] = mean(jnp.minimum(moved, sample_cap(greatest_kl)))
    return metrics


def _activity(terms: _Terms, limits: LimiterConfig) -> dict[str, jax.Array]:
    """Activity of the loss's limiters, by name."""
    activity = {}
    if limits.log_ratio is not None:
        activity["log_ratio"] = limiters.beyond(terms.log_ratio, limits.log_ratio)
    if limits.advantage_std_min is not None and terms.std is not None:
        activity["advantage_std"] = limiters.outside(terms.std, limits.advantage_std_min, None)
    if limits.value_target is not None:
        activity["value_target"] = limiters.beyond(terms.raw_targets, limits.value_target)
    if limits.value_error is not None:
        activity["value_error"] = limiters.beyond(jax.lax.stop_gradient(terms.error), limits.value_error)
    if terms.epsilon_value is not None:
        moved = _over(terms.values - terms.old_value, terms.unit)
        activity["value"] = limiters.beyond(moved, terms.epsilon_value)
    return activity


def _times(bound: float | None, scale: jax.Array | None) -> Any:
    return bound if bound is None or scale is None else bound * scale


def _over(x: jax.Array, unit: jax.Array | None) -> jax.Array:
    return x if unit is None else x / unit


def _kl(old: Normal, new: Normal, most: float) -> jax.Array:
    """KL(old || new), `[...]`, at most `most` so that its mean is a number and no single sample's."""
    return limiters.clip(new.kl_from(old), most)


def _explained_variance(
    targets: jax.Array, values: jax.Array, valid: masked.Mask, valid_share: jax.Array | None
) -> jax.Array:
    """1 - Var(target - value) / Var(target); 1 is a perfect value function, 0 one that knows the mean only."""
    center = sharding.mean(masked.mean(targets, valid, valid_share))
    error_center = sharding.mean(masked.mean(targets - values, valid, valid_share))
    variance = sharding.mean(masked.mean(jnp.square(targets - center), valid, valid_share))
    unexplained = sharding.mean(masked.mean(jnp.square(targets - values - error_center), valid, valid_share))
    return 1.0 - unexplained / jnp.maximum(variance, _EPSILON)
