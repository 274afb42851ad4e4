"""Actions: from the policy's numbers to the controls of the actuators, with delay and filter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.config.robot import ActionConfig
from rlstable.robot import actuators
from rlstable.robot.model import Robot
from rlstable.robot.past import Past


def scales(robot: Robot, config: ActionConfig) -> np.ndarray:
    """Change of each control by an action of -1 and by one of 1, `[2, actuators]`."""
    share = np.array([getattr(config.scale, actuator.kind) for actuator in robot.actuators], np.float32)
    sides = share * np.stack([robot.of_actuators("down"), robot.of_actuators("up")])
    if config.scale.force is None:
        return sides
    most = [
        config.scale.force * min(actuators.force_limits(robot.model, i), default=np.inf) / one.stiffness
        if one.kind == "position"
        else np.inf
        for i, one in enumerate(robot.actuators)
    ]
    return np.minimum(sides, np.array(most, np.float32))


def buffer_length(config: ActionConfig) -> int:
    """Number of actions to remember: those of the longest delay, and at least the last two."""
    return max(2, config.delay[1] + 1)


def remembered(past: Past, action: jax.Array, config: ActionConfig) -> Past:
    """The past with a new action, delayed and filtered: `filter` is the share of the old value that stays."""
    actions = jnp.concatenate([action[None], past.actions[:-1]])
    delayed = actions[past.delay] if config.delay[1] else action
    filtered = config.filter * past.filtered + (1 - config.filter) * delayed
    return past.replace(actions=actions, filtered=filtered)


def controls(robot: Robot, action: jax.Array, config: ActionConfig) -> jax.Array:
    """Controls of all actuators: at home, plus the scaled action, within the actuators' limits."""
    down, up = scales(robot, config)
    moved = robot.of_actuators("home") + jnp.where(action < 0, down, up) * action
    return jnp.clip(moved, robot.of_actuators("low"), robot.of_actuators("high"))


def clipped(action: jax.Array, config: ActionConfig) -> jax.Array:
    return action if config.clip is None else jnp.clip(action, -config.clip, config.clip)
