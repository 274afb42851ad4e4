"""Reward terms: numbers per second, each of which the configuration weighs.

Terms that reward lie between 0 and 1. Terms that a negative weight turns into costs are in units of the robot itself,
its weight or its largest forces, so that one weight suits large and small robots.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config.robot import Growing
from rlstable.config.schema import Positive, Share
from rlstable.robot.model import Robot
from rlstable.robot.past import Past
from rlstable.robot.terms import by_name, grown, needs

_STILL = 0.1  # a slower command means: stand


@needs("base", "command velocity")
def track_linear_velocity(
    robot: Robot, data: Any, past: Past, action: jax.Array, *, width: Positive = 0.5
) -> jax.Array:
    """1 at the commanded velocity forward and sideways, `exp(-(error / width)**2)`; `width` in m/s."""
    error = past.command["velocity"][:2] - robot.linear_velocity(data)[:2]
    return jnp.exp(-jnp.sum(jnp.square(error / width)))


@needs("base", "command velocity")
def track_angular_velocity(
    robot: Robot, data: Any, past: Past, action: jax.Array, *, width: Positive = 0.5
) -> jax.Array:
    """1 at the commanded turning rate, `exp(-(error / width)**2)`; `width` in rad/s."""
    error = past.command["velocity"][2] - robot.angular_velocity(data)[2]
    return jnp.exp(-jnp.square(error / width))


@needs("base")
def vertical_velocity(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Square of the root body's velocity along its own vertical axis; a cost."""
    return jnp.square(robot.linear_velocity(data)[2])


@needs("base")
def rolling(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Squares of the root body's rates of roll and pitch; a cost."""
    return jnp.sum(jnp.square(robot.angular_velocity(data)[:2]))


def upright(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """1 if the root body is upright, 0.5 on its side, 0 upside down."""
    return (1 + robot.upright(data)) / 2


def height(
    robot: Robot, data: Any, past: Past, action: jax.Array, *, share: Positive = 1.0, width: Positive = 0.25
) -> jax.Array:
    """1 if the root body is at `share` of its height at home; `width` of the bell is a share of that height too."""
    robot.check_height("share")
    target = share * robot.home_height
    return jnp.exp(-jnp.square((robot.height(data) - target) / (width * max(abs(robot.home_height), 1e-3))))


def raised(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Height of the centre of mass: 1 at the highest pose of the joints, 0 at the lowest."""
    low, high = robot.mass_heights
    return jnp.clip((data.subtree_com[0, 2] - low) / max(high - low, 1e-6), 0.0, 1.0)


def alive(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """1 in every step."""
    return jnp.ones(())


def energy(robot: Robot, data: Any, past: Past, action: jax.Array, *, most: Positive = 10.0) -> jax.Array:
    """Mechanical power of the actuators divided by the weight of the robot, in m/s, clipped at `most`; a cost."""
    # Exploring with strong motors on a light body, as the ant's, would cost more than all rewards together.
    return jnp.minimum(jnp.sum(jnp.abs(data.qfrc_actuator * data.qvel)) / robot.weight, most)


def torque(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Mean square of the actuators' forces, each as a share of its largest force; a cost."""
    return jnp.mean(jnp.square(data.actuator_force / robot.of_actuators("force")))


def action_rate(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Mean square of the change of the action since the step before; a cost."""
    return jnp.mean(jnp.square(past.actions[0] - past.actions[1]))


@needs("joints")
def joint_limits(robot: Robot, data: Any, past: Past, action: jax.Array, *, share: Share = 0.9) -> jax.Array:
    """Sum of the distances beyond the middle `share` of the joints' ranges; a cost."""
    limited = [joint for joint in robot.joints if np.isfinite(joint.high - joint.low)]
    beyond = jnp.zeros(())
    for joint in limited:
        middle, half = (joint.high + joint.low) / 2, share * (joint.high - joint.low) / 2
        beyond += jnp.maximum(jnp.abs(data.qpos[joint.qpos] - middle) - half, 0.0)
    return beyond


@needs("joints")
def pose(robot: Robot, data: Any, past: Past, action: jax.Array, *, width: Positive = 0.5) -> jax.Array:
    """1 if all joints are at home, `exp(-mean((q - home)**2) / width**2)`."""
    error = data.qpos[robot.qpos_of_joints] - robot.of_joints("home")
    return jnp.exp(-jnp.mean(jnp.square(error)) / width**2)


@needs("joints")
def joint_speed(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Mean square of the joints' velocities; a cost."""
    return jnp.mean(jnp.square(data.qvel[robot.dof_of_joints]))


@needs("feet", "command velocity")
def short_steps(robot: Robot, data: Any, past: Past, action: jax.Array, *, target: Growing = 0.15) -> jax.Array:
    """Seconds of flight that each landing foot lacks to `target`, per control step; 0 for a command to stand; cost."""
    landed = past.landed_after
    moving = jnp.linalg.norm(past.command["velocity"]) > _STILL
    lacks = jnp.maximum(grown(target, past.trained) - landed, 0.0)
    lacking = jnp.sum(jnp.where(landed > 0, lacks, 0.0)) / robot.control_dt
    return jnp.where(moving, lacking, 0.0)


@needs("feet")
def slip(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Sum of the squared horizontal speeds of the feet that touch something; a cost."""
    return jnp.sum(past.contact * jnp.sum(jnp.square(past.foot_velocities[:, :2]), axis=-1))


@needs("feet")
def dragging(robot: Robot, data: Any, past: Past, action: jax.Array, *, target: Positive = 0.08) -> jax.Array:
    """Horizontal speed of each foot times the squared share of the height `target`, in m, that it lacks; a cost."""
    above = past.foot_positions[:, 2] - robot.ground(past.foot_positions[:, :2])
    lacks = jnp.maximum(target - above, 0.0) / target
    return jnp.sum(jnp.square(lacks) * jnp.linalg.norm(past.foot_velocities[:, :2], axis=-1))


@needs("command pose")
def reach(
    robot: Robot, data: Any, past: Past, action: jax.Array, *, site: str | None = None, width: Positive = 0.1
) -> jax.Array:
    """1 if a site is at the commanded position, `exp(-distance / width)`; null: the site farthest from the root."""
    apart = past.command["pose"] - data.site_xpos[robot.site(site)]
    return jnp.exp(-jnp.sqrt(jnp.sum(jnp.square(apart)) + 1e-12) / width)


def contact(robot: Robot, data: Any, past: Past, action: jax.Array, *, geoms: tuple[str, ...]) -> jax.Array:
    """Number of the named geoms, or bodies, that touch anything; a cost."""
    return sum((robot.touches(data, name) for name in geoms), jnp.zeros(()))


TERMS = by_name(
    track_linear_velocity, track_angular_velocity, vertical_velocity, rolling, upright, height, raised, alive, energy,
    torque, action_rate, joint_limits, pose, joint_speed, short_steps, slip, dragging,
    reach, contact,
)  # fmt: skip
