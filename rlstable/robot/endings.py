"""Ending terms: whether an episode ends. `env.episode_length` truncates episodes in any case."""

from __future__ import annotations

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from pydantic import Field

from rlstable.config.schema import Finite, Positive
from rlstable.robot.model import Robot
from rlstable.robot.past import Past
from rlstable.robot.terms import by_name, needs

Degrees = Annotated[Finite, Field(gt=0, le=180)]


def fallen(robot: Robot, data: Any, past: Past, action: jax.Array, *, angle: Degrees = 60.0) -> jax.Array:
    """The root body leans by more than `angle` degrees; never true of a robot whose base is fixed."""
    if not robot.moves:
        return jnp.zeros((), bool)
    return ~(robot.upright(data) >= math.cos(math.radians(angle)))


def too_low(robot: Robot, data: Any, past: Past, action: jax.Array, *, share: Positive = 0.5) -> jax.Array:
    """The root body is below this share of its height at home."""
    robot.check_height("share")
    return ~(robot.height(data) >= robot.home_height - (1 - share) * abs(robot.home_height))


def contact(robot: Robot, data: Any, past: Past, action: jax.Array, *, geoms: tuple[str, ...]) -> jax.Array:
    """One of the named geoms, or bodies, touches anything."""
    return jnp.any(jnp.stack([robot.touches(data, name) for name in geoms]) > 0)


@needs("truncation")
def time(robot: Robot, data: Any, past: Past, action: jax.Array, *, seconds: Positive) -> jax.Array:
    """The episode has lasted for this time; this truncates it, so that its last value is no failure."""
    return past.steps * robot.control_dt >= seconds - 1e-6


TERMS = by_name(fallen, too_low, contact, time)
