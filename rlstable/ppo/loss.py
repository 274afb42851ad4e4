"""The PPO loss: clipped surrogate, value error, entropy. The same terms as in Brax, with a mask and limiters."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.guards import limiters, masked
from rlstable.ppo import gae
from rlstable.ppo.distributions import Normal
from rlstable.ppo.networks import Networks, Params
from rlstable.ppo.normalizer import Statistics
from rlstable.ppo.records import Collected, Minibatch, Targets

_EPSILON = 1e-8  # keeps the divisor of advantages above 0, as in Brax

Bound = jax.Array | float


def estimate(
    networks: Networks,
    params: Params,
    statistics: Statistics,
    data: Collected,
    values: jax.Array,
    config: PPOConfig,
) -> Targets:
    """Value targets and raw advantages of unrolls by GAE, `[T, B]` each, without gradient."""
    targets, advantages = gae.estimate(
        rewards=data.reward,
        values=jax.lax.stop_gradient(values),
        bootstrap_value=jax.lax.stop_gradient(networks.value(params, statistics, data.bootstrap_observation)),
        truncation=data.truncation,
        termination=data.termination,
        discount=config.discounting,
        lambda_=config.gae_lambda,
    )
    if networks.config.use_distributional_critic:
        targets = advantages + jax.lax.stop_gradient(values)  # as in Brax
    return Targets(targets, advantages)


def standardize(
    advantages: jax.Array, valid: masked.Mask, valid_share: jax.Array | None, min_std: float | None
) -> tuple[jax.Array, jax.Array]:
    """Scales advantages to mean 0 and standard deviation 1 over the valid samples of all devices.

    Args:
        advantages: Raw advantages.
        valid: Mask of the samples.
        valid_share: `masked.share` of the whole minibatch.
        min_std: Smallest divisor; None for no floor. Without a floor nearly equal advantages become rounding errors of
            size 1.

    Returns:
        The scaled advantages, and their standard deviation before scaling.
    """
    center, std = masked.mean_and_std(advantages, valid, valid_share)
    return (advantages - center) / (limiters.floor(std, min_std) + _EPSILON), std


class LossTerms(NamedTuple):
    """The terms of the loss, and intermediate results for its diagnostics.

    Attributes:
        loss: Sum of the next three.
        policy: Loss of the clipped surrogate.
        value: Loss of the value estimates, with its coefficient.
        entropy_loss: Negative entropy, with its cost.
        entropy: Entropy in nats.
        distribution: Action distribution of the policy.
        values: Value estimates.
        ratio: New probability over old, after the limiter.
        log_ratio: Logarithm of the ratio before the limiter.
        epsilon: Clipping of the ratio.
        raw_targets: Value targets before the limiter.
        targets: Value targets after the limiter.
        advantage_std: Standard deviation of the advantages; None if they are not normalised.
        value_error: Value errors, in units.
        value_move: Change of the values since the rollout, in units; None without value clipping.
        epsilon_value: Clipping of the values, in units; None for no clipping.
        activity: By limiter of the networks, its activity per sample.
    """

    loss: jax.Array
    policy: jax.Array
    value: jax.Array
    entropy_loss: jax.Array
    entropy: jax.Array
    distribution: Normal
    values: jax.Array
    ratio: jax.Array
    log_ratio: jax.Array
    epsilon: Bound
    raw_targets: jax.Array
    targets: jax.Array
    advantage_std: jax.Array | None
    value_error: jax.Array
    value_move: jax.Array | None
    epsilon_value: Bound | None
    activity: dict[str, jax.Array]


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
) -> tuple[jax.Array, LossTerms]:
    """The loss on this device's part of a minibatch, and its terms.

    Averaged over devices, the loss is the mean over all valid samples of the minibatch, and so is its gradient.

    Args:
        params: Policy and value parameters.
        statistics: Observation statistics.
        minibatch: Samples `[T, B]` with preprocessed observations, finite even where a sample is invalid. If the
            minibatch has no targets, this function estimates them.
        valid_share: `masked.share` of the whole minibatch; None without a mask.
        networks: Networks for preprocessed observations (`Networks.without_preprocessing`).
        config: Hyperparameters.
        limits: Bounds of the limiters.
        clip_scale: Factor on the clipping of ratio and value; None for 1.

    """
    data = minibatch.collected
    distribution, activity = networks.distribution(params, statistics, data.observation)
    quantiles = None
    if networks.config.use_distributional_critic:
        quantiles = networks.value_quantiles(params, statistics, data.observation)
        values = jnp.mean(quantiles, axis=-1)
    else:
        values = networks.value(params, statistics, data.observation)
    (raw_targets, advantages), std = _targets_and_advantages(
        networks, params, statistics, minibatch, valid_share, values, config, limits
    )
    targets = limiters.clip(raw_targets, limits.value_target)
    raw_action, old_value = masked.zero_invalid((data.raw_action, data.value), data.valid)

    def mean(x: jax.Array) -> jax.Array:
        return masked.mean(x, data.valid, valid_share)

    log_ratio = masked.zero_invalid(distribution.log_prob(raw_action) - data.log_prob, data.valid)
    ratio = limiters.ratio(log_ratio, limits.log_ratio)
    epsilon = _scaled(config.clipping_epsilon, clip_scale)
    policy_loss = -mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages))

    # With normalised values, errors are measured in standard deviations of the value targets.
    unit = None if statistics.value is None else statistics.value.std
    if quantiles is not None:
        epsilon_value, error = None, _in_units(targets - values, unit)
        quantile_error = _in_units(targets[..., None] - quantiles, unit)
        value_loss = mean(quantile_huber(quantile_error, config.clipping_epsilon_value or 1.0))
        value_loss = value_loss * config.vf_loss_coefficient
    else:
        epsilon_value = None if (bound := config.clipping_epsilon_value) is None else _scaled(bound, clip_scale)
        error, value_error = _value_error(values, old_value, targets, unit, epsilon_value, limits.value_error)
        value_loss = mean(value_error) * 0.5 * config.vf_loss_coefficient

    entropy = mean(distribution.entropy(minibatch.noise))
    entropy_loss = -config.entropy_cost * entropy
    loss = policy_loss + value_loss + entropy_loss

    clips = epsilon_value is not None and old_value is not None
    value_move = _in_units(values - old_value, unit) if clips else None
    terms = LossTerms(
        loss, policy_loss, value_loss, entropy_loss, entropy, distribution, values, ratio, log_ratio, epsilon,
        raw_targets, targets, std, error, value_move, epsilon_value, activity,
    )  # fmt: skip
    return loss, terms


def quantile_huber(error: jax.Array, kappa: float) -> jax.Array:
    """The quantile Huber loss of each sample, the mean over its quantiles (Dabney et al. 2017, arXiv:1710.10044).

    Brax's form: without the division by kappa of the paper.

    Args:
        error: Value target minus quantile, `[..., N]`, for quantiles in rising order.
        kappa: Error beyond which the loss grows linearly.
    """
    levels = (jnp.arange(error.shape[-1]) + 0.5) / error.shape[-1]
    return jnp.mean(jnp.abs(levels - (error < 0.0)) * 0.5 * limiters.squared(error, kappa), axis=-1)


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
    """The minibatch's targets, estimated here if it has none, and the standard deviation of the advantages."""
    data, targets, std = minibatch.collected, minibatch.targets, minibatch.advantage_std
    if targets is None:
        targets = estimate(networks, params, statistics, data, values, config)
        if config.normalize_advantage:
            advantage, std = standardize(targets.advantage, data.valid, valid_share, limits.advantage_std_min)
            targets = targets._replace(advantage=advantage)
    return masked.zero_invalid(targets, data.valid), std


def _value_error(
    values: jax.Array,
    old_value: jax.Array | None,
    targets: jax.Array,
    unit: jax.Array | None,
    epsilon: Bound | None,
    huber_delta: float | None,
) -> tuple[jax.Array, jax.Array]:
    """The error of the value estimates, and the loss of each sample.

    Args:
        values: Value estimates.
        old_value: Value estimates of the collecting network; needed with `epsilon`.
        targets: Value targets.
        unit: Unit of errors; None for 1.
        epsilon: Clipping of the values, in units; None for no clipping.
        huber_delta: Error beyond which the loss grows linearly (Huber), in units; None for a square everywhere.

    Returns:
        The error in units, and the squared error. With `epsilon`, the loss is the larger of the squared error and the
        squared error of the clipped value.
    """
    error = _in_units(targets - values, unit)
    squared = limiters.squared(error, huber_delta)
    if epsilon is None or old_value is None:
        return error, squared
    moved = limiters.clip(_in_units(values - old_value, unit), epsilon)
    clipped = _in_units(targets - old_value, unit) - moved
    return error, jnp.maximum(squared, limiters.squared(clipped, huber_delta))


def _scaled(bound: float, scale: jax.Array | None) -> Bound:
    return bound if scale is None else bound * scale


def _in_units(x: jax.Array, unit: jax.Array | None) -> jax.Array:
    return x if unit is None else x / unit
