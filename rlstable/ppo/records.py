"""Samples between rollout and loss: collected experience, a batch with targets, and minibatches."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import Observation, PyTree
from rlstable.ppo.distance import ActionMoments
from rlstable.ppo.distributions import Normal


class Lesson(NamedTuple):
    """A teacher's part of a sample.

    Attributes:
        action: The teacher's mean action as it takes effect, within [-1, 1], `[..., A]`.
        weight: Weight of the imitation loss, one number for all samples of an iteration, `[...]`.
        practice: Whether PPO's policy loss and entropy bonus count, bool; also one for all samples, `[...]`.
    """

    action: jax.Array
    weight: jax.Array
    practice: jax.Array


class Collected(NamedTuple):
    """Experience of the rollout, `[rows, T]`; inside a minibatch `[T, B]`.

    Attributes:
        observation: The parts of the observation that the networks read.
        raw_action: Action before squashing, `[..., A]`.
        log_prob: Log-probability of the raw action under the collecting policy.
        distribution: Action distribution of the collecting policy.
        value: Value estimate of the collecting network; None if no option needs it.
        reward: Reward times `ppo.reward_scaling`; `reward.shape` clips it.
        truncation: 1.0 where the episode was cut.
        termination: 1.0 where the environment ended the episode.
        valid: bool mask; None if no sample can be invalid.
        time_out: 1.0 where the environment's time limit ended the episode; None without `bootstrap_on_timeout`.
        bootstrap_observation: Observation after the last step, with a time axis of 1.
        memory: State of a recurrent policy before the first step, with a time axis of 1; None without one.
        lesson: The teacher's action and its weight; None without `ppo.teacher`.
    """

    observation: Observation
    raw_action: jax.Array
    log_prob: jax.Array
    distribution: Normal
    value: jax.Array | None
    reward: jax.Array
    truncation: jax.Array
    termination: jax.Array
    valid: jax.Array | None
    time_out: jax.Array | None
    bootstrap_observation: Observation
    memory: jax.Array | None = None
    lesson: Lesson | None = None


class Targets(NamedTuple):
    """Value targets and advantages, `[rows, T]` or `[T, B]` each."""

    value: jax.Array
    advantage: jax.Array


class Batch(NamedTuple):
    """Data of all SGD epochs of one iteration, `[rows, T]`.

    Attributes:
        collected: Experience with preprocessed observations.
        targets: Computed once for all epochs; None if the loss computes them.
        reference: Action moments of the policy that the distance is measured from; None without a distance.
    """

    collected: Collected
    targets: Targets | None
    reference: ActionMoments | None


class Minibatch(NamedTuple):
    """Data of one SGD step, `[T, B]`; the first three fields are as in `Batch`.

    Attributes:
        noise: Standard normal draws for the entropy estimate, `[T, B, A]`.
        advantage_std: Standard deviation that the advantages were divided by, one number, broadcast to `[T, B]`; None
            if the loss standardises advantages or they stay raw.
    """

    collected: Collected
    targets: Targets | None
    reference: ActionMoments | None
    noise: jax.Array
    advantage_std: jax.Array | None = None

    @classmethod
    def of(cls, rows: Batch, key: jax.Array) -> Minibatch:
        """Makes a minibatch of some rows of a batch, with noise from a random key."""
        collected, targets, reference = swap_axes(rows)
        return cls(collected, targets, reference, jax.random.normal(key, collected.raw_action.shape))


def swap_axes(samples: PyTree) -> PyTree:
    """Swaps the row and the time axis of every array."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), samples)
