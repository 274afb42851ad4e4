"""Physics of one environment in MJX; `rlstable.envs.native.Pipeline` has the same two methods for C MuJoCo."""

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
    """MJX in JAX; with `forces` it computes `cfrc_ext` after the steps, as Gymnasium does."""

    def __init__(self, model: mujoco.MjModel, forces: bool = False):
        self._model = model
        self._forces = forces

    def start(self, model: PyTree, **arrays: jax.Array) -> PyTree:
        from mujoco import mjx

        return mjx.forward(model, mjx.make_data(self._model, impl="jax").replace(**arrays))

    def steps(self, model: PyTree, state: PyTree, action: jax.Array, n_substeps: int = 1) -> PyTree:
        from mujoco import mjx

        def step(state: PyTree, _: None) -> tuple[PyTree, None]:
            return mjx.step(model, state), None

        last = jax.lax.scan(step, state.replace(ctrl=action), None, length=n_substeps)[0]
        return mjx.rne_postconstraint(model, last) if self._forces else last
