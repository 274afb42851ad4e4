"""The optimizer: gradient clipping, Adam and its kin from optax, the learning rate as traced data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable.config.guards import LimiterConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.run import LossScaleConfig
from rlstable.guards import limiters
from rlstable.ppo.flat import ParamFlattener
from rlstable.ppo.state import Tuning

CRITIC_RATE = 1e-3  # the critic is never slowed below this rate, or the configured one where that is lower


class Rates(NamedTuple):
    """Learning rates of one update, float32 scalars.

    Attributes:
        policy: Of the policy network.
        value: Of the value network.
    """

    policy: jax.Array
    value: jax.Array


class Candidate(NamedTuple):
    """A candidate update: parameters and optimizer state that follow if it is accepted.

    Attributes:
        params: Parameters.
        opt_state: Optimizer state.
        update_norm: Global norm of the step between.
        parameter_norm: Global norm of the parameters before it.
        activity: Share of a limiter's numbers that were at their bound, by limiter that is on.
    """

    params: Any
    opt_state: Any
    update_norm: jax.Array
    parameter_norm: jax.Array
    activity: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Turns gradients into candidate parameters.

    Attributes:
        config: Learning rate, schedule, kind of optimizer, `max_grad_norm`.
        limits: Bounds of gradients and updates.
        separate_rates: Whether policy and critic may come to have rates of their own.
    """

    config: PPOConfig
    limits: LimiterConfig
    separate_rates: bool = False

    @property
    def max_norm(self) -> float | None:
        """The tighter of `ppo.max_grad_norm` and the limiter."""
        bounds = [bound for bound in (self.config.max_grad_norm, self.limits.gradient_norm) if bound is not None]
        return min(bounds, default=None)

    def init(self, params: Any) -> Any:
        """The state before the first update."""
        return self._transform(1.0).init(params)

    def candidate(
        self,
        gradients: Any,
        gradient_norm: jax.Array,
        opt_state: Any,
        params: Any,
        rates: Rates,
        clip_scale: jax.Array | None = None,
        layout: ParamFlattener | None = None,
    ) -> Candidate:
        """The parameters and optimizer state that would follow, as vectors where what is given are.

        Args:
            gradients: Averaged over devices.
            gradient_norm: Their global norm.
            opt_state: Before.
            params: Before.
            rates: Learning rates; of one and the same array they are one rate.
            clip_scale: A factor on the bounds of gradient and update; None for none.
            layout: Of the vectors; None for trees.
        """
        activity = {}
        tighter = 1.0 if clip_scale is None else clip_scale
        if self.limits.gradient_block is not None:
            limit, split = self.limits.gradient_block, (lambda x: x) if layout is None else layout.split
            gradients, activity["gradient_block"] = _clip_blocks(split(gradients), split(params), limit)
            gradients = gradients if layout is None else layout.join(gradients)
            gradient_norm = optax.global_norm(gradients)
        if self.max_norm is not None:
            activity["gradient_norm"] = limiters.beyond(gradient_norm, self.max_norm * tighter)
        direction, new_state = self._transform(tighter).update(gradients, opt_state, params)
        update = _scaled(direction, rates, layout)
        norm, parameter_norm = optax.global_norm(update), optax.global_norm(params)
        if self.limits.update_norm is not None:
            bound = self.limits.update_norm * tighter * jnp.maximum(parameter_norm, 1.0)
            activity["update_norm"] = limiters.beyond(norm, bound)
            # Chosen, so that an update within its bound is not touched by a rounding error.
            shrink = jnp.where(norm <= bound, 1.0, bound / norm)
            update, norm = jax.tree.map(lambda u: u * shrink, update), norm * shrink
        return Candidate(optax.apply_updates(params, update), new_state, norm, parameter_norm, activity)

    def rates(self, tuning: Tuning, progress: Callable[[], jax.Array]) -> Rates:
        """The learning rates.

        A policy that has to be slowed must not slow its critic: advantages would become the critic's error, and the
        policy would follow them. So the critic keeps a rate of `CRITIC_RATE`, or the configured one where it is lower.

        Args:
            tuning: The rate and what remedies and limiters have made of it.
            progress: Gives the share of the run that is done, for a rate that depends on it: with any other, runs of
                different lengths have one program.
        """
        config = self.config
        rate = tuning.learning_rate * tuning.learning_rate_scale
        if config.schedules_by_progress:
            rate = rate * self._schedule(progress())
        if not self.separate_rates:
            return Rates(rate, rate)
        slowed = rate * tuning.step_scale
        policy = slowed * self.policy_pace(tuning)
        return Rates(policy, jnp.maximum(slowed, jnp.minimum(rate, CRITIC_RATE)) * tuning.critic_rate_scale)

    def policy_pace(self, tuning: Tuning) -> jax.Array:
        """Factor of the remedies on the policy's rate, at most 1; 0 while the policy is held."""
        return jnp.where(tuning.policy_hold > 0, 0.0, tuning.policy_rate_scale)

    def _transform(self, tighter: Any) -> optax.GradientTransformation:
        own = self.config.optimizer
        parts = [] if self.max_norm is None else [optax.clip_by_global_norm(self.max_norm * tighter)]
        scale = optax.scale_by_amsgrad if own.name == "amsgrad" else optax.scale_by_adam
        parts.append(scale(b1=own.b1, b2=own.b2, eps=own.eps))
        if own.name == "adamw":
            parts.append(optax.add_decayed_weights(own.weight_decay))
        return optax.chain(*parts)

    @property
    def _schedule(self) -> optax.Schedule:
        """The factor on the base rate over the share of the run done, which optax takes for its count."""
        config = self.config
        floor = config.learning_rate_schedule_min_lr / config.learning_rate
        left = 1.0 - config.learning_rate_warmup
        main = {
            "constant": optax.constant_schedule(1.0),
            "linear": optax.linear_schedule(1.0, min(floor, 1.0), left),
            "cosine": optax.cosine_decay_schedule(1.0, left, min(floor, 1.0)),
        }[config.learning_rate_schedule]
        if not config.learning_rate_warmup:
            return main
        warmup = optax.linear_schedule(0.0, 1.0, config.learning_rate_warmup)
        return optax.join_schedules([warmup, main], [config.learning_rate_warmup])


def _scaled(direction: Any, rates: Rates, layout: ParamFlattener | None) -> Any:
    """The update of a direction, a tree `{"policy", "value"}` or the vector that a layout makes of one."""
    if rates.policy is rates.value:
        return jax.tree.map(lambda d: -rates.policy * d, direction)
    if layout is not None and layout.joined:
        return -layout.per_network({"policy": rates.policy, "value": rates.value}) * direction
    return {
        name: jax.tree.map(lambda d, rate=rate: -rate * d, direction[name])
        for name, rate in (("policy", rates.policy), ("value", rates.value))
    }


def _clip_blocks(gradients: Any, params: Any, limit: float) -> tuple[Any, jax.Array]:
    """Adaptive gradient clipping (Brock et al. 2021, arXiv:2102.06171), and the share of blocks that it shortened."""
    clipped, _ = optax.adaptive_grad_clip(limit).update(gradients, optax.EmptyState(), params)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(clipped), strict=True)
    shortened = [jnp.any(before != after).astype(jnp.float32) for before, after in pairs]
    return clipped, jnp.mean(jnp.stack(shortened))


def count_down_policy_hold(tuning: Tuning) -> Tuning:
    """The tuning of the next iteration: counts down the iterations in which the policy is held."""
    return dataclasses.replace(tuning, policy_hold=jnp.maximum(tuning.policy_hold - 1, 0))


def adapt_to_kl(tuning: Tuning, kl: jax.Array, config: PPOConfig) -> Tuning:
    """Brax's adaptive rate: a factor 1.5 down where the KL is over twice the desired one, up where under half of it.

    A KL of NaN counts as too high: Brax's two comparisons would both be false, and nothing would happen.
    """
    kl = jax.lax.stop_gradient(kl)
    low, high = config.learning_rate_schedule_min_lr, config.learning_rate_schedule_max_lr
    rate = tuning.learning_rate
    rate = jnp.where(kl <= config.desired_kl * 2.0, rate, jnp.maximum(low, rate / 1.5))
    rate = jnp.where((kl < config.desired_kl / 2.0) & (kl > 0.0), jnp.minimum(high, rate * 1.5), rate)
    return dataclasses.replace(tuning, learning_rate=rate)


def adapt_loss_scale(tuning: Tuning, finite: jax.Array, config: LossScaleConfig) -> Tuning:
    """Halves the loss scale after an overflow, down to its floor; doubles it after a finite stretch, up to its cap."""
    good_steps = jnp.where(finite, tuning.good_steps + 1, 0)
    grown = jnp.where(
        good_steps >= config.growth_interval,
        jnp.minimum(tuning.loss_scale * 2.0, config.cap),
        tuning.loss_scale,
    )
    scale = jnp.where(finite, grown, jnp.maximum(tuning.loss_scale * 0.5, config.floor))
    return dataclasses.replace(
        tuning, loss_scale=scale, good_steps=jnp.where(good_steps >= config.growth_interval, 0, good_steps)
    )
