"""Limiters: bounds in normal operation, and the activity that each bound reports.

A limit of None disables a limiter: JAX traces nothing and no activity is reported.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax


def clip(x: jax.Array, limit: float | jax.Array | None) -> jax.Array:
    """`x` clipped to `[-limit, limit]`. NaN stays NaN for a guard to find."""
    return x if limit is None else jnp.clip(x, -limit, limit)


def within(x: jax.Array, bounds: jax.Array | None) -> jax.Array:
    """Finite numbers clipped to `bounds`, least and greatest, `[2]`; the others stay for a guard to find."""
    return x if bounds is None else jnp.where(jnp.isfinite(x), jnp.clip(x, bounds[0], bounds[1]), x)


def beyond(x: jax.Array, limit: float | jax.Array) -> jax.Array:
    """1.0 where `clip` is active, else 0.0. NaN counts as active."""
    return (~(jnp.abs(x) <= limit)).astype(jnp.float32)


def squared(error: jax.Array, delta: float | None) -> jax.Array:
    """Squared error, linear beyond `delta`: twice the Huber loss (Huber 1964). None for the plain square."""
    return jnp.square(error) if delta is None else 2.0 * optax.losses.huber_loss(error, delta=delta)


def bounded(x: jax.Array, low: float | None, high: float | None) -> jax.Array:
    """`x` clipped to `[low, high]`, with a gradient that leads back inside.

    A plain clip has no gradient outside the bounds, so a standard deviation below its floor would stay there for ever.
    Here the gradient passes, unless gradient descent would move `x` further out.
    """
    if low is None and high is None:
        return x
    return _bounded(-jnp.inf if low is None else low, jnp.inf if high is None else high, x)


def ratio(log_ratio: jax.Array, limit: float | None) -> jax.Array:
    """The exponential of a log-ratio clipped to `[-limit, limit]`; None for no bound.

    Beyond the bound, the gradient is the gradient at a ratio of 1. It leads back inside without a gradient spike: at
    a limit of 20, the slope of the exponential is 5e8. PPO's clipping removes gradients that lead further out.
    """
    if limit is None:
        return jnp.exp(log_ratio)
    outside = (beyond(log_ratio, limit) > 0) & jnp.isfinite(log_ratio)
    slope_of_one = jnp.where(outside, log_ratio - jax.lax.stop_gradient(log_ratio), 0.0)
    return jnp.exp(clip(log_ratio, limit)) + slope_of_one


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bounded(low: float, high: float, x: jax.Array) -> jax.Array:
    return jnp.clip(x, low, high)


def _bounded_forward(low: float, high: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.clip(x, low, high), x


def _bounded_backward(low: float, high: float, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    leads_out = ((x <= low) & (cotangent > 0)) | ((x >= high) & (cotangent < 0))
    return (jnp.where(leads_out, 0.0, cotangent),)


_bounded.defvjp(_bounded_forward, _bounded_backward)


def outside(x: jax.Array, low: float | None, high: float | None) -> jax.Array:
    """1.0 where `bounded` is active, else 0.0. NaN counts as active."""
    inside = jnp.ones(x.shape, bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return (~inside).astype(jnp.float32)
