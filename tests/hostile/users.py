"""Environments as users write them, a few lines each, which are legal and once were trained wrongly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from toys import Physics, State


class Cart:
    """A point on a line, pushed by the action: velocity 0.9 v + 0.1 a, position x + 0.1 v.

    Subclasses change `observe`, `reward` or `info`. Reward 1 - |x - command|.
    """

    observation_size, action_size = 3, 1
    backend = None

    def __init__(self, **kwargs: Any):
        self.kwargs = kwargs

    def reset(self, rng: jax.Array) -> State:
        zero = jnp.zeros(())
        physics = Physics(0.1 * jax.random.normal(rng, (1,)), jnp.zeros(1), jnp.zeros(1))
        info = {"ticks": zero, "command": zero, "rng": rng}
        state = State(physics, jnp.zeros(3), zero, zero, {}, info)
        return state.replace(obs=self.observe(state))

    def step(self, state: State, action: jax.Array) -> State:
        velocity = 0.9 * state.pipeline_state.qd + 0.1 * jnp.clip(action, -1, 1)
        physics = state.pipeline_state.replace(q=state.pipeline_state.q + 0.1 * velocity, qd=velocity)
        state = state.replace(pipeline_state=physics, info={**state.info, **self.info(state.info)})
        return state.replace(obs=self.observe(state), reward=self.reward(state))

    def info(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"ticks": info["ticks"] + 1}

    def observe(self, state: State) -> jax.Array:
        return jnp.concatenate([state.pipeline_state.q, state.pipeline_state.qd, state.info["command"][None]])

    def reward(self, state: State) -> jax.Array:
        return 1.0 - jnp.abs(state.pipeline_state.q[0] - state.info["command"])


class LateCommand(Cart):
    """A command that is 0 for the first steps of each environment, and then a number in +-0.3 for 100 steps each.

    Args:
        late: Steps of an environment, over all its episodes, in which the command is 0.
    """

    def __init__(self, late: int = 3000, **kwargs: Any):
        super().__init__(**kwargs)
        self.late = late

    def info(self, info: dict[str, Any]) -> dict[str, Any]:
        ticks = info["ticks"] + 1
        rng, key = jax.random.split(info["rng"])
        new = jax.random.uniform(key, minval=-0.3, maxval=0.3)
        draws = (ticks >= self.late) & ((ticks - self.late) % 100 == 0)
        return {"ticks": ticks, "rng": rng, "command": jnp.where(draws, new, info["command"])}
