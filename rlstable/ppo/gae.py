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

    corrections = _discounted(deltas, carried)
    targets = corrections + values
    next_targets = jnp.concatenate([targets[1:], bootstrap_value[None]], axis=0)
    advantages = jnp.where(truncation > 0, 0.0, rewards + continues * next_targets - values)
    return jax.lax.stop_gradient(targets), jax.lax.stop_gradient(advantages)


def _discounted(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    r"""Discounted sums \(A_t = \delta_t + w_t A_{t+1}\), with nothing after the last step; `[T, B]` each."""
    if jax.default_backend() == "cpu":
        # A loop of a few microseconds here, and T kernel launches on an accelerator.
        return _one_by_one(deltas, weights)
    return _in_halves(deltas, weights)


def _one_by_one(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    def backward(following: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, weight = step
        advantage = delta + weight * following
        return advantage, advantage

    return jax.lax.scan(backward, jnp.zeros_like(deltas[0]), (deltas, weights), reverse=True)[1]


def _in_halves(deltas: jax.Array, weights: jax.Array) -> jax.Array:
    """The same up to rounding, in log T steps (Blelloch 1990, Prefix sums and their applications)."""

    def joined(later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (delta_later, weight_later), (delta, weight) = later, earlier
        return delta + weight * delta_later, weight * weight_later

    return jax.lax.associative_scan(joined, (deltas, weights), reverse=True)[0]
