"""The KL limiter: if SGD moves the policy too far, undoes the excess and shortens later steps of the policy.

- Measure: the mean distance (`distance`) to the policy that collected the batch. The loss of each minibatch computes
  the distance at almost no cost. No sample counts for more than ten times the limit, so at least a tenth of the
  samples must have moved before the limiter acts.
- Within an epoch: after an overshoot SGD accepts no further update, and the epoch ends at the fallback. The fallback
  is the start of the last epoch that stayed within the limit, so an overshoot costs one or two epochs.
- After the iteration: the trust region measures the final policy once more, with the last update and the new
  normaliser. Beyond the limit the iteration's SGD is undone, so no policy that SGD moved beyond it collects experience.

Only the policy's steps are shortened, because a slowed critic would fall behind (`Optimizer.rates`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstable.device.transforms import select_if
from rlstable.device.trees import PyTree
from rlstable.ppo.settings import Settings
from rlstable.ppo.state import Tuning

# A rate 1,000 times too high is corrected within 5 iterations. One overshoot by chance is forgotten after 28.
_SHRINK, _GROW, _MIN_STEP_SCALE = 0.25, 1.05, 1e-6


def limit(settings: Settings, tuning: Tuning) -> jax.Array | float | None:
    """Largest mean distance of the policy in nats, tightened by remedies; None for no limit."""
    configured = settings.limits.kl
    return configured if configured is None or not settings.tightens else configured * tuning.clip_scale


def check(
    skipped: jax.Array | None, metrics: dict[str, jax.Array], tuning: Tuning, limit: jax.Array | float | None
) -> tuple[jax.Array | bool, jax.Array | None, Tuning]:
    """Decides from the distance in a minibatch whether SGD continues; also returns the new `skipped` and tuning.

    An overshoot stops SGD and shortens later steps. A NaN distance stops SGD and shortens nothing. `skipped` are the
    minibatches without an update since the policy moved too far, int32. Without a limit, in nats, SGD always continues.
    """
    if skipped is None or limit is None:
        return True, skipped, tuning
    moved = metrics["training/policy_distance"]
    overshot = (skipped == 0) & ~(moved <= limit)
    updating = ~overshot & (skipped == 0)
    tuning = _shorten_steps(overshot & jnp.isfinite(moved), tuning)
    return updating, jnp.where(updating, 0, skipped + 1), tuning


def check_iteration(
    skipped: jax.Array, moved: jax.Array, tuning: Tuning, limit: jax.Array | float, minibatches: int
) -> tuple[jax.Array, jax.Array, Tuning]:
    """Decides whether the iteration as a whole moved the policy too far, by a mean distance in nats.

    Also returns the new `skipped` and tuning. An undone iteration counts all its minibatches as skipped.
    """
    overshot = ~(moved <= limit)
    first = overshot & (skipped == 0) & jnp.isfinite(moved)
    return overshot, jnp.where(overshot, minibatches, skipped), _shorten_steps(first, tuning)


def close_epoch(skipped: jax.Array | None, start: PyTree, fallback: PyTree, end: PyTree) -> tuple[PyTree, PyTree]:
    """Chooses the state to continue from after an epoch, and the fallback of the next epoch.

    SGD returns to the fallback if the policy moved too far. Both fallbacks are None if the limiter is off.
    """
    if skipped is None:
        return end, None
    # On a CPU `select` would read all parameters and moments in every epoch.
    state, _, next_fallback = select_if(skipped > 0, lambda states: (states[1],) * 3, (end, fallback, start))
    return state, next_fallback


def relax(skipped: jax.Array | None, tuning: Tuning) -> Tuning:
    """Lengthens steps again after an iteration without an overshoot, up to full length."""
    if skipped is None:
        return tuning
    longer = jnp.minimum(tuning.step_scale * _GROW, 1.0)
    return dataclasses.replace(tuning, step_scale=jnp.where(skipped == 0, longer, tuning.step_scale))


def _shorten_steps(overshot: jax.Array, tuning: Tuning) -> Tuning:
    shorter = jnp.maximum(tuning.step_scale * _SHRINK, _MIN_STEP_SCALE)
    return dataclasses.replace(tuning, step_scale=jnp.where(overshot, shorter, tuning.step_scale))
