"""Toy environments whose steps go bad for a reason."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from toys import PointMass


class Overflowing(PointMass):
    """Whose reward is infinite in float32, which 1e60 does not fit into, and 138 in float64."""

    def step(self, state: Any, action: jax.Array) -> Any:
        state = super().step(state, action)
        return state.replace(reward=jnp.log(jnp.square(1e30 * (1.0 + 0.0 * state.reward))))


class Keyed(PointMass):
    """Which carries a typed random key, and whose observation is too large."""

    def reset(self, rng: jax.Array) -> Any:
        state = super().reset(rng)
        return state.replace(info={**state.info, "typed": jax.random.key(3)})

    def step(self, state: Any, action: jax.Array) -> Any:
        key, draw = jax.random.split(state.info["typed"])
        state = super().step(state, action)
        noise = 1e7 * (1.0 + jax.random.uniform(draw))
        return state.replace(obs=state.obs.at[3].add(noise), info={**state.info, "typed": key})
