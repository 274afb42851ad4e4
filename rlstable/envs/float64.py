"""Physics in float64 around networks in float32: the last resort against simulations that blow up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstable.guards.env import physics


class Float64Physics:
    """An environment that computes in float64 and shows float32 outside its physics state.

    Actions are widened; observation, reward, done, metrics and `info` are narrowed. What an environment draws inside
    are other numbers than in float32, though from the same keys.

    Args:
        env: One environment with Brax's Env interface, traced here under `jax.enable_x64()`; the program around it has
            to be lowered and called under it too, `Precision.compiled`.
    """

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, rng: jax.Array) -> Any:
        """A first state."""
        with jax.enable_x64(True):
            return _narrowed(self._env.reset(rng))

    def step(self, state: Any, action: jax.Array) -> Any:
        """A step."""
        with jax.enable_x64(True):
            return _narrowed(self._env.step(state, action.astype(jnp.float64)))


def _narrowed(state: Any) -> Any:
    """Float32 everywhere but in the physics."""
    field = "pipeline_state" if hasattr(state, "pipeline_state") else "data"
    outside = jax.tree.map(_narrow, state.replace(**{field: None}))
    return outside.replace(**{field: physics(state)})


def _narrow(x: Any) -> Any:
    wide = {jnp.dtype(jnp.float64): jnp.float32, jnp.dtype(jnp.int64): jnp.int32, jnp.dtype(jnp.uint64): jnp.uint32}
    kind = jnp.result_type(x)
    return jnp.asarray(x, wide[kind]) if kind in wide else x
