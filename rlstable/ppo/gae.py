"""Generalized advantage estimation (Schulman et al. 2016, arXiv:1506.02438), as Brax computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def estimate(
    *,
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    truncation: jax.Array,
    termination: jax.Array,
    discount: float,
    lambda_: float,
) -> tuple[jax.Array, jax.Array]:
    r"""Value targets and advantages, without gradient.

    With \(\delta_t = r_t + \gamma (1 - d_t) V_{t+1} - V_t\):

    - \(A_t = \delta_t + \gamma \lambda (1 - d_t) A_{t+1}\), zero at a truncation.
    - The value target is \(A_t + V_t\).
    - The advantage for the policy is \(r_t + \gamma (1 - d_t) \mathrm{target}_{t+1} - V_t\), zero at a truncation.

    Args:
        rewards: Scaled rewards, `[T, B]`.
        values: Value estimates of the observations, `[T, B]`.
        bootstrap_value: Value estimate of the observation after the last step, `[B]`.
        truncation: 1.0 where an episode was cut (time limit, quarantine), `[T, B]`.
        termination: 1.0 where the environment ended the episode, `[T, B]`.
        discount: Discount per step.
        lambda_: Weight between one step (0) and the whole unroll (1).

    Returns:
        Value targets and advantages, each `[T, B]`.
    """
    discounts = discount * (1.0 - termination)
    next_values = jnp.concatenate([values[1:], bootstrap_value[None]], axis=0)
    deltas = jnp.where(truncation > 0, 0.0, rewards + discounts * next_values - values)
    weights = jnp.where(truncation > 0, 0.0, discounts * lambda_)

    corrections = _discounted_sums(deltas, weights)
    targets = corrections + values
    next_targets = jnp.concatenate([targets[1:], bootstrap_value[None]], axis=0)
    advantages = jnp.where(truncation > 0, 0.0, rewards + discounts * next_targets - values)
    return jax.lax.stop_gradient(targets), jax.lax.stop_gradient(advantages)


def _discounted_sums(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    r"""Discounted sums \(A_t = \delta_t + w_t A_{t+1}\), with 0 after the last step; `[T, B]` each."""
    if jax.default_backend() == "cpu":
        # On a CPU the loop takes a few microseconds; on an accelerator it would launch T kernels.
        return _by_loop(deltas, weights)
    return _by_prefix_sums(deltas, weights)


def _by_loop(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    def backward(following: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, weight = step
        advantage = delta + weight * following
        return advantage, advantage

    return jax.lax.scan(backward, jnp.zeros_like(deltas[0]), (deltas, weights), reverse=True)[1]


def _by_prefix_sums(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    """Equal to `_by_loop` up to rounding, in log T steps (Blelloch 1990, Prefix sums and their applications)."""

    def merge(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (delta_later, weight_later), (delta, weight) = later, earlier
        return delta + weight * delta_later, weight * weight_later

    return jax.lax.associative_scan(merge, (deltas, weights), reverse=True)[0]
