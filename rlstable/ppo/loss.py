"""The PPO loss: clipped surrogate, value error, entropy as in Brax, and imitation, with a mask and limiters."""

from __future__ import annotations

import dataclasses
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


class LossTerms(NamedTuple):
    """The terms of the loss, and intermediate results for its diagnostics.

    Attributes:
        loss: Sum of the losses of policy, value and entropy, and of the weighted imitation error.
        value: Loss of the value estimates, with its coefficient.
        entropy_loss: Negative entropy, with its cost.
        entropy: Entropy in nats.
        ratio: New probability over old, after the limiter.
        log_ratio: Logarithm of the ratio before the limiter.
        epsilon: Clipping of the ratio.
        raw_targets: Value targets before the limiter.
        targets: Value targets after the limiter.
        advantage_std: Standard deviation of the advantages; None if they are not normalised.
        value_error: Value errors, in units.
        value_move: Change of the values since the rollout, in units; None without value clipping.
        epsilon_value: Clipping of the values, in units; None for no clipping.
        activity: By limiter of networks and values, its activity per sample.
        imitation_error: Squared distance of the mean actions of policy and teacher; None without a teacher.
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
    imitation_error: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Loss:
    """The PPO loss.

    Attributes:
        networks: Those without preprocessing (`Networks.without_preprocessing`).
        value_range: Least and greatest value where an episode is cut, `[2]`; None for no bounds.
    """

    networks: Networks
    config: PPOConfig
    limits: LimiterConfig
    value_range: jax.Array | None = None

    def terms(
        self,
        params: Params,
        statistics: Statistics,
        minibatch: Minibatch,
        valid_share: jax.Array | None,
        clip_scale: jax.Array | None = None,
    ) -> LossTerms:
        """The terms of the loss on this device's part of a minibatch.

        Averaged over devices, the loss is the mean over all valid samples of the minibatch, and so is its gradient. The
        observations are preprocessed and finite even where a sample is invalid. If the minibatch has no targets, this
        function estimates them. `clip_scale` is a factor on the clipping of ratio and value, None for 1.
        """
        networks, config, limits, data = self.networks, self.config, self.limits, minibatch.collected
        distribution, activity = networks.over_time(params, statistics, data)
        quantiles = None
        if networks.config.use_distributional_critic:
            quantiles = networks.value_quantiles(params, statistics, data.observation)
            values = jnp.mean(quantiles, axis=-1)
        else:
            values = networks.value(params, statistics, data.observation)
        if self.value_range is not None:
            activity |= {"value_range": (self.counted(values, data.truncation) != values).astype(jnp.float32)}
        targets, std = minibatch.targets, minibatch.advantage_std
        if targets is None:
            targets, std = self.standardized(self.estimate(params, statistics, data, values), data.valid, valid_share)
        raw_targets, advantages = masked.zero_invalid(targets, data.valid)
        clipped_targets = limiters.clip(raw_targets, limits.value_target)
        raw_action, old_value = masked.zero_invalid((data.raw_action, data.value), data.valid)

        def mean(x: jax.Array) -> jax.Array:
            return masked.mean(x, data.valid, valid_share)

        log_ratio = masked.zero_invalid(distribution.log_prob(raw_action) - data.log_prob, data.valid)
        ratio = limiters.ratio(log_ratio, limits.log_ratio)
        epsilon = _scaled(config.clipping_epsilon, clip_scale)
        policy_loss = -mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - epsilon, 1 + epsilon) * advantages))

        # With normalised values, errors are measured in standard deviations of the value targets.
        unit = None if statistics.value is None else statistics.value.std
        error, epsilon_value, value_move = _in_units(clipped_targets - values, unit), None, None
        if quantiles is not None:
            quantile_error = _in_units(clipped_targets[..., None] - quantiles, unit)
            value_loss = mean(quantile_huber(quantile_error, config.clipping_epsilon_value or 1.0))
            value_loss = value_loss * config.vf_loss_coefficient
        else:
            squared = limiters.squared(error, limits.value_error)
            if config.clipping_epsilon_value is not None and old_value is not None:
                epsilon_value = _scaled(config.clipping_epsilon_value, clip_scale)
                value_move = _in_units(values - old_value, unit)
                clipped = _in_units(clipped_targets - old_value, unit) - limiters.clip(value_move, epsilon_value)
                squared = jnp.maximum(squared, limiters.squared(clipped, limits.value_error))
            value_loss = mean(squared) * 0.5 * config.vf_loss_coefficient

        entropy = mean(distribution.entropy(minibatch.noise))
        entropy_loss = -config.entropy_cost * entropy
        loss, imitation_error = policy_loss + value_loss + entropy_loss, None
        if data.lesson is not None:
            imitation_error = mean(imitation(distribution, masked.zero_invalid(data.lesson.action, data.valid)))
            weight, practice = data.lesson.weight[0, 0], data.lesson.practice[0, 0]
            policy_loss, entropy_loss = (jnp.where(practice, x, 0.0) for x in (policy_loss, entropy_loss))
            loss = policy_loss + value_loss + entropy_loss + jnp.where(weight > 0, weight * imitation_error, 0.0)
        return LossTerms(
            loss=loss, policy=policy_loss, value=value_loss,
            entropy_loss=entropy_loss, entropy=entropy, distribution=distribution, values=values, ratio=ratio,
            log_ratio=log_ratio, epsilon=epsilon, raw_targets=raw_targets, targets=clipped_targets, advantage_std=std,
            value_error=error, value_move=value_move, epsilon_value=epsilon_value, activity=activity,
            imitation_error=imitation_error,
        )  # fmt: skip

    def estimate(self, params: Params, statistics: Statistics, data: Collected, values: jax.Array) -> Targets:
        """Value targets and raw advantages of unrolls by GAE, `[T, B]` each, without gradient."""
        last = jax.tree.map(lambda x: x[0], data.bootstrap_observation)
        values, bootstrap = jax.lax.stop_gradient((values, self.networks.value(params, statistics, last)))
        values = self.counted(values, data.truncation)
        targets, advantages = gae.estimate(
            rewards=data.reward,
            values=values,
            bootstrap_value=bootstrap,
            truncation=data.truncation,
            termination=data.termination,
            discount=self.config.discounting,
            lambda_=self.config.gae_lambda,
        )
        if self.networks.config.use_distributional_critic:
            targets = advantages + values  # as in Brax
        return Targets(targets, advantages)

    def counted(self, values: jax.Array, truncation: jax.Array) -> jax.Array:
        """Value estimates as targets use them: where an episode is cut, within `value_range`.

        No target corrects the estimate of the last state before a cut, but all estimates of the episode rest on it, so
        it can run away and take the critic along.
        """
        if self.value_range is None:
            return values
        return jnp.where(truncation > 0, limiters.within(values, self.value_range), values)

    def standardized(
        self, targets: Targets, valid: masked.Mask, valid_share: jax.Array | None
    ) -> tuple[Targets, jax.Array | None]:
        """Targets with scaled advantages, and their standard deviation; unchanged without `ppo.normalize_advantage`."""
        if not self.config.normalize_advantage:
            return targets, None
        advantage, std = standardize(targets.advantage, valid, valid_share, self.limits.advantage_std_min)
        return targets._replace(advantage=advantage), std


def standardize(
    advantages: jax.Array, valid: masked.Mask, valid_share: jax.Array | None, min_std: float | None
) -> tuple[jax.Array, jax.Array]:
    """Scales advantages to mean 0 and standard deviation 1 over the valid samples of all devices.

    Without the floor `min_std`, nearly equal advantages would become rounding errors of size 1. The second result is
    the standard deviation before scaling.
    """
    center, std = masked.mean_and_std(advantages, valid, valid_share)
    divisor = std if min_std is None else jnp.maximum(std, min_std)
    return (advantages - center) / (divisor + _EPSILON), std


def imitation(distribution: Normal, action: jax.Array) -> jax.Array:
    """Squared distance of each sample's mean action to the teacher's, `[...]`, summed over action elements.

    The teacher's `action` is clipped to the range of actions. The policy's is squashed, but not clipped: a clip would
    have no gradient that leads back inside.
    """
    return jnp.sum(jnp.square(distribution.action(distribution.loc) - action), axis=-1)


def quantile_huber(error: jax.Array, kappa: float) -> jax.Array:
    """The quantile Huber loss of each sample, the mean over its quantiles (Dabney et al. 2017, arXiv:1710.10044).

    Brax's form: without the division by kappa of the paper. `error` is value target minus quantile, `[..., N]`, for
    quantiles in rising order; beyond `kappa` the loss grows linearly.
    """
    levels = (jnp.arange(error.shape[-1]) + 0.5) / error.shape[-1]
    return jnp.mean(jnp.abs(levels - (error < 0.0)) * 0.5 * limiters.squared(error, kappa), axis=-1)


def _scaled(bound: float, scale: jax.Array | None) -> Bound:
    return bound if scale is None else bound * scale


def _in_units(x: jax.Array, unit: jax.Array | None) -> jax.Array:
    return x if unit is None else x / unit
