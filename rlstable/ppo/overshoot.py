"""The KL limiter: SGD that moves the policy too far is taken back and over, and later steps are shorter.

The KL is measured where it costs nothing, in the loss of the next minibatch, against the policy at the start of SGD
under the same observation statistics. It is a mean in which no sample counts for more than ten times the limit, so that
a tenth of the samples have to agree: a plain mean is often that of a single one, in a state that is hardly ever seen.
What an epoch began with is proven once the whole epoch was within the bound, so going back costs an epoch or two, and
carries nothing from minibatch to minibatch. The very last update is not measured.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.ppo.state import Tuning
from rlstable.rarely import apply_if

# A rate 1,000 times too high is found out in 5 iterations, and a step that was long by chance is long again in 28.
_SHORTER, _LONGER, _LEAST = 0.25, 1.05, 1e-6


def under_way(passed_over: jax.Array | None) -> jax.Array | bool:
    """Whether nothing has been passed over yet; `passed_over` is None where the limiter is off."""
    return True if passed_over is None else passed_over == 0


def judge(
    passed_over: jax.Array | None, metrics: dict[str, jax.Array], tuning: Tuning, limit: float | None
) -> tuple[jax.Array | bool, jax.Array | None, Tuning]:
    """Whether SGD goes on.

    Args:
        passed_over: int32, minibatches since the policy moved too far; None where the limiter is off.
        metrics: Of the loss.
        tuning: Before.
        limit: Largest mean KL, None for any.

    Returns:
        Whether it goes on; the count and the tuning after. Steps are shortened where one was too long; a KL that is NaN
        says nothing of that.
    """
    if passed_over is None or limit is None:
        return True, passed_over, tuning
    kl = metrics["training/kl_update"]
    overshot = (passed_over == 0) & ~(kl <= limit)
    going = ~overshot & (passed_over == 0)
    shorter = jnp.maximum(tuning.step_scale * _SHORTER, _LEAST)
    scale = jnp.where(overshot & jnp.isfinite(kl), shorter, tuning.step_scale)
    tuning = dataclasses.replace(tuning, step_scale=scale)
    return going, jnp.where(going, 0, passed_over + 1), tuning


def settle(passed_over: jax.Array | None, start: Any, proven: Any, end: Any) -> tuple[Any, Any]:
    """Closes an epoch: what to go on from, and what to go back to after the next one.

    Args:
        passed_over: int32, minibatches since the policy moved too far; None where the limiter is off.
        start: What the epoch began with.
        proven: What to go back to in this epoch; None where the limiter is off, likewise the second result.
        end: What it ended with. Nothing was accepted since the policy moved too far.
    """
    if passed_over is None:
        return end, None
    # A select per array would be a pass over parameters and moments in every epoch, and a kernel each.
    on_from, _, back_to = apply_if(passed_over > 0, lambda found: (found[1],) * 3, (end, proven, start))
    return on_from, back_to


def recover(passed_over: jax.Array | None, tuning: Tuning) -> Tuning:
    """Steps that grow back to their full length over iterations in which the policy did not overshoot."""
    if passed_over is None:
        return tuning
    longer = jnp.minimum(tuning.step_scale * _LONGER, 1.0)
    return dataclasses.replace(tuning, step_scale=jnp.where(passed_over == 0, longer, tuning.step_scale))
