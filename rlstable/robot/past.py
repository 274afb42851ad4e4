"""The past of one environment: what terms may read beside its present physics."""

from __future__ import annotations

import jax
from flax import struct

from rlstable.config.schema import INT32_MAX


class Past(struct.PyTreeNode):
    """The values that one environment keeps from step to step, in `info`, which resets and resumes restore.

    Attributes:
        rng: Random key.
        steps: Control steps since the reset.
        command: Commands that are in force, by name.
        actions: The policy's actions, newest first, `[n, actuators]`, n at least 2.
        delay: Control steps between an action and its effect, of this episode.
        filtered: Action after delay and filter, `[actuators]`.
        contact: Whether each foot touches something, 0 or 1, `[feet]`.
        air_time: Seconds since the last contact of each foot, `[feet]`.
        landed_after: Seconds in the air of each foot that landed in this step, else 0, `[feet]`.
        foot_positions: `[feet, 3]`, world frame.
        foot_velocities: `[feet, 3]`, world frame, mean over the step.
        history: Values of the observation terms that need older ones, newest first, by term.
        lags: Delay of each of these terms in control steps, of this episode.
        trained: Environment steps trained so far, int32; the largest int32 outside of training.
        center: Centre of the tile on which the episode begins, relative to the origin, `[3]`; None without terrain.
    """

    rng: jax.Array
    steps: jax.Array
    command: dict[str, jax.Array]
    actions: jax.Array
    delay: jax.Array
    filtered: jax.Array
    contact: jax.Array
    air_time: jax.Array
    landed_after: jax.Array
    foot_positions: jax.Array
    foot_velocities: jax.Array
    history: dict[str, jax.Array]
    lags: dict[str, jax.Array]
    trained: jax.Array | int = INT32_MAX
    center: jax.Array | None = None
