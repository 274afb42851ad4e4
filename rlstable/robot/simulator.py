"""Physics of one robot in MJX; `rlstable.envs.native` has the same two methods for C MuJoCo."""

from __future__ import annotations

from typing import Protocol

import jax
import mujoco

from rlstable.device.trees import PyTree


class Simulator(Protocol):
    """Starts and steps the physics of one environment."""

    def start(self, model: PyTree, **arrays: jax.Array) -> PyTree:
        """A first state with these arrays (`qpos` and others), with everything computed from them."""

    def steps(self, model: PyTree, state: PyTree, action: jax.Array, n_substeps: int = 1) -> PyTree:
        """Several physics steps with the same controls."""


class MjxSimulator:
    """MJX in JAX."""

    def __init__(self, model: mujoco.MjModel):
        self._model = model

    def start(self, model: PyTree, **arrays: jax.Array) -> PyTree:
        from mujoco import mjx

        return mjx.forward(model, mjx.make_data(self._model, impl="jax").replace(**arrays))

    def steps(self, model: PyTree, state: PyTree, action: jax.Array, n_substeps: int = 1) -> PyTree:
        from mujoco import mjx

        def step(state: PyTree, _: None) -> tuple[PyTree, None]:
            return mjx.step(model, state), None

        return jax.lax.scan(step, state.replace(ctrl=action), None, length=n_substeps)[0]
