"""The KL limiter: SGD that moves the policy too far is taken back, and later steps of the policy are shorter.

What is measured is the distance from the policy that collected the batch, as the environment sees it (`distance`), in
the loss of the next minibatch, where it costs next to nothing. It is a mean in which no sample counts for more than ten
times the limit, so that a tenth of the samples have to agree. What an epoch began with is proven once the whole epoch
was within the bound, so going back costs an epoch or two, and carries nothing from minibatch to minibatch. The end of
the iteration is measured once more, last update and normaliser included: what is beyond the bound there is taken back
to where the iteration began, so no policy beyond the bound ever collects.

Only the policy's steps are shortened: a critic that is slowed with them falls behind (`Optimizer.rates`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.device.transforms import apply_if
from rlstable.ppo.state import Tuning

# A rate 1,000 times too high is found out in 5 iterations, and a step that was long by chance is long again in 28.
_SHORTER, _LONGER, _LEAST = 0.25, 1.05, 1e-6


def limit(config: Config, tuning: Tuning) -> jax.Array | float | None:
    """The bound of the policy's mean distance in nats, as tight as a remedy has made it; None for none."""
    configured = config.guards.limiters.kl
    return configured if configured is None or not config.may_tighten_clipping else configured * tuning.clip_scale


def still_updating(passed_over: jax.Array | None) -> jax.Array | bool:
    """Whether nothing has been passed over yet; `passed_over` is None where the limiter is off."""
    return True if passed_over is None else passed_over == 0


def check(
    passed_over: jax.Array | None, metrics: dict[str, jax.Array], tuning: Tuning, limit: jax.Array | float | None
) -> tuple[jax.Array | bool, jax.Array | None, Tuning]:
    """Decides whether SGD continues.

    Args:
        passed_over: int32, minibatches since the policy moved too far; None where the limiter is off.
        metrics: Of the loss.
        tuning: Before.
        limit: Largest mean distance in nats, None for any.

    Returns:
        Whether SGD continues; the count and the tuning after. A step that was too long shortens later steps; a distance
        that is NaN stops SGD and shortens nothing.
    """
    if passed_over is None or limit is None:
        return True, passed_over, tuning
    moved = metrics["training/policy_distance"]
    overshot = (passed_over == 0) & ~(moved <= limit)
    going = ~overshot & (passed_over == 0)
    tuning = _shortened(overshot & jnp.isfinite(moved), tuning)
    return going, jnp.where(going, 0, passed_over + 1), tuning


def close_epoch(
    passed_over: jax.Array, moved: jax.Array, tuning: Tuning, limit: jax.Array | float, minibatches: jax.Array
) -> tuple[jax.Array, jax.Array, Tuning]:
    """Decides whether the end of an iteration is too far from its beginning.

    Args:
        passed_over: int32, minibatches since the policy moved too far.
        moved: Mean distance from the collecting policy to the one that would collect next.
        tuning: Before.
        limit: Largest mean distance in nats.
        minibatches: int32, of the iteration, all of which are lost where it is too far.
    """
    over = ~(moved <= limit)
    long = over & (passed_over == 0) & jnp.isfinite(moved)
    return over, jnp.where(over, minibatches, passed_over), _shortened(long, tuning)


def settle(passed_over: jax.Array | None, start: Any, proven: Any, end: Any) -> tuple[Any, Any]:
    """Closes an epoch: the state to continue from, and the state to go back to after the next epoch.

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


def relax(passed_over: jax.Array | None, tuning: Tuning) -> Tuning:
    """Lets steps grow back to full length over iterations in which the policy did not overshoot."""
    if passed_over is None:
        return tuning
    longer = jnp.minimum(tuning.step_scale * _LONGER, 1.0)
    return dataclasses.replace(tuning, step_scale=jnp.where(passed_over == 0, longer, tuning.step_scale))


def _shortened(overshot: jax.Array, tuning: Tuning) -> Tuning:
    shorter = jnp.maximum(tuning.step_scale * _SHORTER, _LEAST)
    return dataclasses.replace(tuning, step_scale=jnp.where(overshot, shorter, tuning.step_scale))
