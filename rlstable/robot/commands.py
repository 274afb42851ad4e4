"""Commands: vectors drawn at the reset, and again every `resample` seconds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.config.robot import GrowingRange
from rlstable.config.schema import Share
from rlstable.robot import build, locomotion
from rlstable.robot.model import Robot
from rlstable.robot.terms import by_name, mirrors, needs


@mirrors("velocity_command")
@needs("base")
def velocity(
    robot: Robot,
    key: jax.Array,
    *,
    forward: GrowingRange | None = None,
    sideways: GrowingRange | None = None,
    turn: GrowingRange | None = None,
    stand: Share = 0.1,
) -> jax.Array:
    """Velocities forward and sideways in m/s and turning in rad/s, uniform; 0 for a share; null: a range that fits."""
    low, high = velocity_ranges(robot, forward, sideways, turn)
    *drawn, standing = jax.random.uniform(key, (4,))  # one draw: each costs as much as the rewards of a step
    return jnp.where(standing < stand, 0.0, low + (high - low) * jnp.array(drawn))


def velocity_ranges(
    robot: Robot,
    forward: GrowingRange | None,
    sideways: GrowingRange | None,
    turn: GrowingRange | None,
    **_: object,
) -> tuple[jax.Array, jax.Array]:
    """The least and the greatest velocities that are asked for, `[3]`; null is what fits, and no curriculum."""
    given = zip((forward, sideways, turn), locomotion.velocities(robot), strict=True)
    low, high = jnp.array([fitting if own is None else own for own, fitting in given]).T * robot.steerable
    return low, high


def text(low: jax.Array, high: jax.Array) -> str:
    """Ranges of velocities as a line that people read."""
    kinds = zip(("forward", "sideways", "turning"), ("m/s", "m/s", "rad/s"), low.tolist(), high.tolist(), strict=True)
    return ", ".join(f"{kind} {a:.3g} to {b:.3g} {unit}" if a < b else f"no {kind}" for kind, unit, a, b in kinds)


@mirrors("vector")
@needs("joints")
def pose(robot: Robot, key: jax.Array, *, site: str | None = None) -> jax.Array:
    """A position in the world that a site can reach; null is the site farthest from the root."""
    index = robot.site(site)
    if not robot.reaches(index):
        name = robot.model.site(index).name.removeprefix(build.LINK)
        raise ConfigError(
            f"site: {name or 'the only one'} does not move with the joints, so every"
            " target would be its place at home; name a site on a body that must reach, or add one to the model"
        )
    positions = jnp.asarray(robot.reachable(index))
    return positions[jax.random.randint(key, (), 0, len(positions))]


TERMS = by_name(velocity, pose)
