"""Resets: positions and velocities of the first state of an episode."""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from pydantic import Field

from rlstable.config.schema import NonNegative, Share
from rlstable.robot.model import Robot
from rlstable.robot.terms import by_name

FirstState = tuple[jax.Array, jax.Array]  # positions [nq], velocities [nv]


def home(robot: Robot, key: jax.Array, *, position: NonNegative = 0.05, velocity: NonNegative = 0.05) -> FirstState:
    """Home, with uniform noise of up to these numbers in the joints' positions and in all velocities."""
    return _noisy(robot, key, robot.home, np.zeros(robot.model.nv), position, velocity)


def keyframes(
    robot: Robot,
    key: jax.Array,
    *,
    names: Annotated[tuple[str, ...], Field(min_length=1)],
    position: NonNegative = 0.05,
    velocity: NonNegative = 0.05,
) -> FirstState:
    """One of the named keyframes of the model, all equally likely, with noise as for `home`."""
    indices = np.array([robot.named("key", name, "names") for name in names])
    key_choice, key = jax.random.split(key)
    chosen = jax.random.randint(key_choice, (), 0, len(indices))
    qpos, qvel = (jnp.asarray(x[indices], jnp.float32)[chosen] for x in (robot.model.key_qpos, robot.model.key_qvel))
    return _noisy(robot, key, qpos, qvel, position, velocity)


def random(robot: Robot, key: jax.Array, *, share: Share = 1.0, velocity: NonNegative = 0.0) -> FirstState:
    """Joints anywhere in this share of their ranges around home; a free root body in any orientation, in the air."""
    # In the air: with the joints at home no part would touch the floor.
    key_joints, key_turn, key_velocity = jax.random.split(key, 3)
    low, high = robot.ranges
    at_home = robot.of_joints("home")
    drawn = jax.random.uniform(key_joints, at_home.shape, minval=low, maxval=high)
    qpos = jnp.asarray(robot.home, jnp.float32).at[robot.qpos_of_joints].set(at_home + share * (drawn - at_home))
    if robot.floating:
        first = robot.free_joint
        turn = jax.random.normal(key_turn, (4,))
        clear = max(float(robot.home[first + 2]), robot.floor + robot.radius)
        qpos = qpos.at[first + 2].set(clear).at[first + 3 : first + 7].set(turn / jnp.linalg.norm(turn))
    qvel = jax.random.uniform(key_velocity, (robot.model.nv,), minval=-velocity, maxval=velocity)
    return qpos, qvel


def _noisy(
    robot: Robot, key: jax.Array, qpos: ArrayLike, qvel: ArrayLike, position: float, velocity: float
) -> FirstState:
    key_position, key_velocity = jax.random.split(key)
    noise = jax.random.uniform(key_position, (len(robot.joints),), minval=-position, maxval=position)
    first = jnp.asarray(qpos, jnp.float32)
    low, high, at_home = (robot.of_joints(field) for field in ("low", "high", "home"))
    joints = jnp.clip(first[robot.qpos_of_joints] + noise, np.minimum(low, at_home), np.maximum(high, at_home))
    moved = jax.random.uniform(key_velocity, (robot.model.nv,), minval=-velocity, maxval=velocity)
    return first.at[robot.qpos_of_joints].set(joints), jnp.asarray(qvel, jnp.float32) + moved


TERMS = by_name(home, keyframes, random)
