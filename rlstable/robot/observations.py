"""Observation terms: vectors that the policy or the critic sees."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlstable.config.schema import Positive
from rlstable.robot.model import Robot
from rlstable.robot.past import Past
from rlstable.robot.terms import by_name, mirrors, needs

INERTIAL = {"gyro": mujoco.mjtSensor.mjSENS_GYRO, "accelerometer": mujoco.mjtSensor.mjSENS_ACCELEROMETER}


@mirrors("joints")
@needs("joints")
def joint_positions(robot: Robot, data: Any, past: Past, action: jax.Array, *, turning: bool = True) -> jax.Array:
    """Positions of the joints relative to home; `turning: false` leaves out hinges without limits."""
    kept = [joint for joint in robot.joints if turning or not joint.turns]
    return jnp.stack([data.qpos[joint.qpos] - joint.home for joint in kept]) if kept else jnp.zeros(0)


@mirrors("directions")
@needs("joints")
def joint_directions(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Sines, then cosines, of the hinges without limits, whose angles grow with every turn."""
    angles = [data.qpos[joint.qpos] for joint in robot.joints if joint.turns]
    return jnp.concatenate([jnp.sin(jnp.stack(angles)), jnp.cos(jnp.stack(angles))]) if angles else jnp.zeros(0)


@mirrors("joints")
@needs("joints")
def joint_velocities(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Velocities of the joints."""
    return data.qvel[robot.dof_of_joints]


@mirrors("vector")
def projected_gravity(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """The direction of gravity, in the frame of the root body; (0, 0, -1) if the body is upright."""
    return jnp.asarray(robot.down) @ robot.rotation(data)


@mirrors("gyro")
def gyro(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Angular velocity of the root body, of its gyro if the model has one there, else in the body's frame."""
    return robot.numbers(data, robot.root_sensor(INERTIAL["gyro"]))


@mirrors("accelerometer")
@needs("accelerometer")
def accelerometer(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Acceleration of the root body, of its accelerometer if the model has one there, else in the body's frame."""
    return robot.numbers(data, robot.root_sensor(INERTIAL["accelerometer"]))


@mirrors("vector")
@needs("base")
def linear_velocity(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Velocity of the root body in its own frame, which few robots can measure; useful for the critic."""
    return robot.linear_velocity(data)


@mirrors("scalar")
def height(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """Height of the root body above the ground."""
    return robot.height(data)[None]


@mirrors("grid")
@needs("terrain")
def height_scan(
    robot: Robot,
    data: Any,
    past: Past,
    action: jax.Array,
    *,
    length: Positive = 1.0,
    width: Positive = 0.6,
    spacing: Positive = 0.1,
) -> jax.Array:
    """Heights of the ground, in m, at the points of a grid that turns with the robot; 0 if as far below as at home."""
    return robot.scanned(data, scan_grid(length, width, spacing))


@mirrors("action")
def last_action(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """The newest action of the policy."""
    return past.actions[0]


@mirrors("command")
def command(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """All commands, in the order of their names."""
    values = [past.command[name] for name in sorted(past.command)]
    return jnp.concatenate(values) if values else jnp.zeros(0)


@mirrors("clock")
def phase(robot: Robot, data: Any, past: Past, action: jax.Array, *, frequency: Positive = 1.5) -> jax.Array:
    """Sine and cosine of a clock with this frequency in hertz, which starts at the reset."""
    angle = 2 * jnp.pi * frequency * past.steps * robot.control_dt
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)])


@mirrors("site")
def site_position(robot: Robot, data: Any, past: Past, action: jax.Array, *, site: str | None = None) -> jax.Array:
    """Position of a site in the world; null is the site farthest from the root."""
    return data.site_xpos[robot.site(site)]


@mirrors("site")
@needs("command pose")
def site_to_target(robot: Robot, data: Any, past: Past, action: jax.Array, *, site: str | None = None) -> jax.Array:
    """Vector from a site to the position of the command `pose`, in the world."""
    return past.command["pose"] - data.site_xpos[robot.site(site)]


@mirrors("sensor")
def sensor(robot: Robot, data: Any, past: Past, action: jax.Array, *, name: str) -> jax.Array:
    """The numbers of a sensor of the model."""
    return robot.sensor(data, name)


@mirrors("action")
def activations(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """State of each actuator, as of a muscle or of a motor with a lag; 0 for one without a state."""
    return robot.activations(data)


@mirrors("contact")
def contact(robot: Robot, data: Any, past: Past, action: jax.Array, *, geoms: tuple[str, ...]) -> jax.Array:
    """For each named geom, or body, 1 if it touches anything, else 0."""
    return jnp.stack([robot.touches(data, name) for name in geoms])


@mirrors("feet")
@needs("feet")
def foot_contacts(robot: Robot, data: Any, past: Past, action: jax.Array) -> jax.Array:
    """For each foot 1 if it touches anything, else 0."""
    return robot.foot_contacts(data)


def scan_grid(length: float, width: float, spacing: float) -> np.ndarray:
    """Points of a height scan in m, forward and to the left, `[rows, columns, 2]`; the first is at the back right."""
    x, y = (spacing * (np.arange(n := round(side / spacing) + 1) - (n - 1) / 2) for side in (length, width))
    return np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).astype(np.float32)


TERMS = by_name(
    joint_positions, joint_directions, joint_velocities, projected_gravity, gyro, accelerometer, linear_velocity,
    height, height_scan, last_action, command, phase, site_position, site_to_target, sensor, activations, contact,
    foot_contacts,
)  # fmt: skip
