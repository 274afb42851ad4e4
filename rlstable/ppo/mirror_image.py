"""Symmetry: adds the mirror image of a batch of experience (Mittal et al. 2024, arXiv:2403.04359)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.device.reflection import Mirror
from rlstable.device.trees import PyTree
from rlstable.ppo.networks import Networks
from rlstable.ppo.records import Collected
from rlstable.ppo.state import TrainState


def with_mirror_image(
    data: Collected, mirror: Mirror, networks: Networks, state: TrainState, unrolls: int
) -> Collected:
    """The batch `[rows, T]` and its mirror image, as if twice as many environments had collected `unrolls` each.

    A mirrored action keeps the log-probability of the action that was drawn. So the ratio compares the policy in the
    mirrored state with the collecting policy in the original one, and its gradient leads to a symmetric policy.
    Distances between policies compare the policies in the same state: there the collecting policy is evaluated again.
    """
    observation, lesson = mirror.observation(data.observation), data.lesson
    image = data._replace(
        observation=observation,
        raw_action=mirror.action(data.raw_action),
        distribution=networks.distribution(state.params, state.normalizer, observation)[0],
        bootstrap_observation=mirror.observation(data.bootstrap_observation),
        lesson=None if lesson is None else lesson._replace(action=mirror.action(lesson.action)),
    )

    def both(x: jax.Array, reflected: jax.Array) -> jax.Array:
        parts = [part.reshape(unrolls, -1, *x.shape[1:]) for part in (x, reflected)]
        return jnp.concatenate(parts, axis=1).reshape(-1, *x.shape[1:])

    joined: PyTree = jax.tree.map(both, data, image)
    return Collected(*joined)
