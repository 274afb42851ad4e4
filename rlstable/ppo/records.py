"""Samples on their way from the rollout to the loss: collected, completed with targets, cut into minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.ppo.distance import ActionMoments
from rlstable.ppo.distributions import Normal


class Collected(NamedTuple):
    """Experience of the rollout, `[rows, T]`; inside a minibatch `[T, B]`.

    Attributes:
        observation: What the networks read.
        raw_action: Before squashing, `[..., A]`.
        log_prob: Of the raw action under the collecting policy.
        distribution: The collecting policy's.
        value: The collecting network's value estimate; None where no option needs it.
        reward: Scaled; `reward.shape` normalises and bounds it.
        truncation: 1.0 where the episode was cut.
        termination: 1.0 where the episode ended by itself.
        valid: bool mask; None where no sample can be invalid.
        time_out: 1.0 where the environment's own time limit ended the episode; None without `bootstrap_on_timeout`.
        bootstrap_observation: Observation after the last step, `[rows]`.
    """

    observation: Any
    raw_action: jax.Array
    log_prob: jax.Array
    distribution: Normal
    value: jax.Array | None
    reward: jax.Array
    truncation: jax.Array
    termination: jax.Array
    valid: jax.Array | None
    time_out: jax.Array | None
    bootstrap_observation: Any


class Targets(NamedTuple):
    """Value targets and advantages, `[rows, T]` or `[T, B]` each."""

    value: jax.Array
    advantage: jax.Array


class Batch(NamedTuple):
    """Data of all SGD epochs of one iteration, `[rows, T]`.

    Attributes:
        collected: Experience with normalised observations.
        targets: Computed once for all epochs; None where the loss computes them from its own values.
        reference: Action moments of the policy that the distance is measured from; None where it is not measured.
    """

    collected: Collected
    targets: Targets | None
    reference: ActionMoments | None


class Minibatch(NamedTuple):
    """Data of one SGD step, `[T, B]`.

    Attributes:
        collected: As in `Batch`.
        targets: As in `Batch`; their advantages are standardised if `advantage_std` is given.
        reference: As in `Batch`.
        noise: Standard normal draws for the entropy estimate, `[T, B, A]`.
        advantage_std: Standard deviation that advantages were divided by, one number, broadcast to `[T, B]`; None where
            the loss standardises them or nothing does.
    """

    collected: Collected
    targets: Targets | None
    reference: ActionMoments | None
    noise: jax.Array
    advantage_std: jax.Array | None = None

    @classmethod
    def of(cls, rows: Batch, key: jax.Array) -> Minibatch:
        """Rows of a batch as a minibatch.

        Args:
            rows: `[B, T]`.
            key: For the noise.
        """
        collected = time_first(rows.collected)
        targets, reference = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (rows.targets, rows.reference))
        return cls(collected, targets, reference, jax.random.normal(key, collected.raw_action.shape))


def map_samples(
    function: Callable[[jax.Array], jax.Array],
    data: Collected,
    bootstrap: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Collected:
    """Applies a function to every array that has a time axis, and another to the bootstrap observation."""
    samples = data._asdict()
    after = samples.pop("bootstrap_observation")
    return Collected(**jax.tree.map(function, samples), bootstrap_observation=jax.tree.map(bootstrap, after))


def time_first(data: Collected) -> Collected:
    """Swaps the first two axes of everything but the bootstrap observation."""
    return map_samples(lambda x: jnp.swapaxes(x, 0, 1), data)
