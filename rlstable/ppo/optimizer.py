"""The optimizer: gradient clipping, Adam, AMSGrad or AdamW from optax, and traced learning rates."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.precision import LossScaleConfig
from rlstable.device.counter import WideCounter
from rlstable.device.trees import PyTree
from rlstable.guards import limiters
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.state import Tuning

CRITIC_RATE = 1e-3  # the KL limiter never slows the critic below this rate, or below a lower configured rate


class Rates(NamedTuple):
    """Learning rates of the two networks, float32 scalars."""

    policy: jax.Array
    value: jax.Array


class Candidate(NamedTuple):
    """A candidate update: parameters and optimizer state that become current if no guard rejects them.

    Attributes:
        update_norm: Global norm of the update.
        parameter_norm: Global norm of the parameters before the update.
        activity: Share of the numbers at the bound of each active limiter, by limiter.
    """

    params: PyTree
    opt_state: PyTree
    update_norm: jax.Array
    parameter_norm: jax.Array
    activity: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Turns gradients into candidate parameters; with `separate_rates` the networks can have different rates."""

    config: PPOConfig
    limits: LimiterConfig
    separate_rates: bool = False

    @property
    def max_norm(self) -> float | None:
        """The smaller of `ppo.max_grad_norm` and `guards.limiters.gradient_norm`; None for no clipping."""
        bounds = [bound for bound in (self.config.max_grad_norm, self.limits.gradient_norm) if bound is not None]
        return min(bounds, default=None)

    def init(self, params: PyTree) -> PyTree:
        """The optimizer state before the first update."""
        return self._transform(1.0).init(params)

    def candidate(
        self,
        gradients: PyTree,
        gradient_norm: jax.Array,
        opt_state: PyTree,
        params: PyTree,
        rates: Rates,
        clip_scale: jax.Array | None = None,
        layout: ParamFlattener | None = None,
    ) -> Candidate:
        """Computes parameters and optimizer state after an update with gradients averaged over devices.

        If both rates are the same array, the update is computed with one rate. `clip_scale` is a factor on the bounds
        of gradient and update, None for 1; `layout` tells how gradients, moments and parameters are joined, None for
        trees.
        """
        activity = {}
        scale = 1.0 if clip_scale is None else clip_scale
        if self.max_norm is not None:
            activity["gradient_norm"] = limiters.beyond(gradient_norm, self.max_norm * scale)
        direction, new_state = self._transform(scale).update(gradients, opt_state, params)
        update = _scaled(direction, rates, layout)
        norm, parameter_norm = optax.global_norm(update), optax.global_norm(params)
        if self.limits.update_norm is not None:
            bound = self.limits.update_norm * scale * jnp.maximum(parameter_norm, 1.0)
            activity["update_norm"] = limiters.beyond(norm, bound)
            # With `where` a short update is multiplied by exactly 1, without a rounding error.
            shrink = jnp.where(norm <= bound, 1.0, bound / norm)
            update, norm = jax.tree.map(lambda u: u * shrink, update), norm * shrink
        return Candidate(optax.apply_updates(params, update), new_state, norm, parameter_norm, activity)

    def rates(self, tuning: Tuning, env_steps: WideCounter) -> Rates:
        """The learning rates of policy and critic after so many environment steps of the run.

        A slowed policy must not slow its critic: a lagging critic gives wrong advantages, and the policy would follow
        them. So the KL limiter slows the critic only down to `CRITIC_RATE`.
        """
        rate = tuning.learning_rate * tuning.learning_rate_scale
        if tuning.total_steps is not None:
            rate = rate * self._schedule(tuning.learning_rate)(env_steps.progress(tuning.total_steps))
        if not self.separate_rates:
            return Rates(rate, rate)
        slowed = rate * tuning.step_scale
        policy = slowed * self.policy_pace(tuning)
        return Rates(policy, jnp.maximum(slowed, jnp.minimum(rate, CRITIC_RATE)) * tuning.critic_rate_scale)

    def policy_pace(self, tuning: Tuning) -> jax.Array:
        """The remedies' factor on the policy's rate, at most 1; 0 while the policy is held."""
        return jnp.where(tuning.policy_hold > 0, 0.0, tuning.policy_rate_scale)

    def _transform(self, clip_scale: jax.Array | float) -> optax.GradientTransformation:
        config = self.config.optimizer
        parts = [] if self.max_norm is None else [optax.clip_by_global_norm(self.max_norm * clip_scale)]
        adam = optax.scale_by_amsgrad if config.name == "amsgrad" else optax.scale_by_adam
        parts.append(adam(b1=config.b1, b2=config.b2, eps=config.eps))
        if config.name == "adamw":
            parts.append(optax.add_decayed_weights(config.weight_decay))
        return optax.chain(*parts)

    def _schedule(self, base: jax.Array) -> optax.Schedule:
        """The factor on the base rate as a function of the finished share of the run, in the place of optax's count."""
        config = self.config
        floor: Any = jnp.minimum(config.learning_rate_schedule_min_lr / base, 1.0)
        duration = 1.0 - config.learning_rate_warmup
        main = {
            "constant": optax.constant_schedule(1.0),
            "linear": optax.linear_schedule(1.0, floor, duration),
            "cosine": optax.cosine_decay_schedule(1.0, duration, floor),
        }[config.learning_rate_schedule]
        if not config.learning_rate_warmup:
            return main
        warmup = optax.linear_schedule(0.0, 1.0, config.learning_rate_warmup)
        return optax.join_schedules([warmup, main], [config.learning_rate_warmup])


def _scaled(direction: PyTree, rates: Rates, layout: ParamFlattener | None) -> PyTree:
    """The step along a direction."""
    if rates.policy is rates.value:
        return jax.tree.map(lambda d: -rates.policy * d, direction)
    if layout is not None and layout.joined:
        return layout.per_network({"policy": -rates.policy, "value": -rates.value}, direction)
    return {
        name: jax.tree.map(lambda d, rate=rate: -rate * d, direction[name])
        for name, rate in (("policy", rates.policy), ("value", rates.value))
    }


def adapt_to_kl(tuning: Tuning, kl: jax.Array, config: PPOConfig) -> Tuning:
    """Brax's adaptive rate: divided by 1.5 if the KL is over twice the desired KL, multiplied if under half of it.

    A NaN KL counts as too high. In Brax both comparisons are false for NaN, and the rate stays.
    """
    kl = jax.lax.stop_gradient(kl)
    low, high = config.learning_rate_schedule_min_lr, config.learning_rate_schedule_max_lr
    rate = tuning.learning_rate
    rate = jnp.where(kl <= config.desired_kl * 2.0, rate, jnp.maximum(low, rate / 1.5))
    rate = jnp.where((kl < config.desired_kl / 2.0) & (kl > 0.0), jnp.minimum(high, rate * 1.5), rate)
    return dataclasses.replace(tuning, learning_rate=rate)


def adapt_loss_scale(tuning: Tuning, finite: jax.Array, config: LossScaleConfig) -> Tuning:
    """Halves the loss scale after an overflow, and doubles it after `growth_interval` finite minibatches."""
    good_steps, scale = jnp.where(finite, tuning.good_steps + 1, 0), tuning.loss_scale
    grows = good_steps >= config.growth_interval
    grown = jnp.where(grows, jnp.minimum(scale * 2.0, config.cap), scale)
    scale = jnp.where(finite, grown, jnp.maximum(scale * 0.5, config.floor))
    return dataclasses.replace(tuning, loss_scale=scale, good_steps=jnp.where(grows, 0, good_steps))
