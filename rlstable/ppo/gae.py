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

    With \(\delta_t = r_t + \gamma (1 - d_t) V_{t+1} - V_t\), set to zero at a truncation,

    \(A_t = \delta_t + \gamma \lambda (1 - d_t) A_{t+1}\), cut at a truncation; the target is \(A_t + V_t\), and the
    advantage that the policy sees is \(r_t + \gamma (1 - d_t) \mathrm{target}_{t+1} - V_t\), zero at a truncation.

    Args:
        rewards: Scaled rewards, `[T, B]`.
        values: Value estimates of the observations, `[T, B]`.
        bootstrap_value: Value estimate of what follows the last step, `[B]`.
        truncation: 1.0 where an episode was cut (time limit, quarantine), `[T, B]`.
        termination: 1.0 where an episode ended by itself, `[T, B]`.
        discount: Discount per step.
        lambda_: Weight between one step (0) and the whole unroll (1).

    Returns:
        Value targets and advantages, each `[T, B]`.
    """
    continues = discount * (1.0 - termination)
    next_values = jnp.concatenate([values[1:], bootstrap_value[None]], axis=0)
    deltas = jnp.where(truncation > 0, 0.0, rewards + continues * next_values - values)
    carried = jnp.where(truncation > 0, 0.0, continues * lambda_)

    def backward(advantage_next: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, weight = step
        advantage = delta + weight * advantage_next
        return advantage, advantage

    _, corrections = jax.lax.scan(backward, jnp.zeros_like(bootstrap_value), (deltas, carried), reverse=True)
    targets = corrections + values
    next_targets = jnp.concatenate([targets[1:], bootstrap_value[None]], axis=0)
    advantages = jnp.where(truncation > 0, 0.0, rewards + continues * next_targets - values)
    return jax.lax.stop_gradient(targets), jax.lax.stop_gradient(advantages)
