"""The optimizer: gradient clipping, Adam and its kin from optax, the learning rate as traced data."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlstable.config import LossScaleConfig, PPOConfig
from rlstable.ppo.state import Tuning


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Turns gradients into candidate parameters.

    Attributes:
        config: Learning rate, schedule, kind of optimizer, `max_grad_norm`.
        norm_limit: The limiter's bound of the global gradient norm, None for none.
        total_steps: Environment steps of the whole run, which schedules divide by.
    """

    config: PPOConfig
    norm_limit: float | None
    total_steps: int

    @property
    def max_norm(self) -> float | None:
        """The tighter of `ppo.max_grad_norm` and the limiter."""
        bounds = [bound for bound in (self.config.max_grad_norm, self.norm_limit) if bound is not None]
        return min(bounds, default=None)

    def init(self, params: Any) -> Any:
        """The state before the first update."""
        return self._transform.init(params)

    def candidate(self, gradients: Any, opt_state: Any, params: Any, rate: jax.Array) -> tuple[Any, Any, Any]:
        """The parameters and optimizer state that would follow, and the step between.

        Args:
            gradients: Averaged over devices.
            opt_state: Before.
            params: Before.
            rate: Learning rate, float32 scalar.

        Returns:
            Candidate parameters, candidate optimizer state, update.
        """
        direction, new_state = self._transform.update(gradients, opt_state, params)
        update = jax.tree.map(lambda d: -rate * d, direction)
        return optax.apply_updates(params, update), new_state, update

    def rate(self, tuning: Tuning, progress: jax.Array) -> jax.Array:
        """The learning rate at a share of the run, float32 scalar."""
        config = self.config
        scaled = tuning.learning_rate * tuning.learning_rate_scale
        if config.learning_rate_schedule == "constant" and not config.learning_rate_warmup:
            return scaled
        if config.learning_rate_schedule == "adaptive_kl":
            return scaled
        return scaled * self._schedule(progress)

    @property
    def _transform(self) -> optax.GradientTransformation:
        own = self.config.optimizer
        parts = [] if self.max_norm is None else [optax.clip_by_global_norm(self.max_norm)]
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
