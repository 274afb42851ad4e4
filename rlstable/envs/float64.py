"""Physics in float64 with networks in float32: the last resort against simulations that blow up."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlstable.device.trees import EnvState
from rlstable.envs.wrapper import EnvWrapper
from rlstable.guards.env import physics, physics_field, without_fields


class Float64Physics(EnvWrapper):
    """An environment that computes in float64 and returns float32 outside its physics state.

    Actions are widened; observation, reward, done, metrics and `info` are narrowed. With the same random keys the
    environment draws other random numbers than in float32. The program around it must be lowered and called under
    `jax.enable_x64()` too (`Precision.compiled`).
    """

    def reset(self, rng: jax.Array) -> EnvState:
        with jax.enable_x64(True):
            return _narrowed(self.env.reset(rng))

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        with jax.enable_x64(True):
            return _narrowed(self.env.step(state, action.astype(jnp.float64)))


def _narrowed(state: EnvState) -> EnvState:
    """The state with float32 everywhere except in the physics."""
    field = physics_field(state)
    return jax.tree.map(_narrow, without_fields(state, field)).replace(**{field: physics(state)})


def _narrow(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    narrow = {jnp.dtype(jnp.float64): jnp.float32, jnp.dtype(jnp.int64): jnp.int32, jnp.dtype(jnp.uint64): jnp.uint32}
    dtype = jnp.result_type(x)
    return jnp.asarray(x, narrow[dtype]) if dtype in narrow else x
