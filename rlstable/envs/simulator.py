"""Physics of one environment in MJX; `rlstable.envs.native.Pipeline` has the same two methods for C MuJoCo."""

from __future__ import annotations

from typing import Protocol

import jax
import mujoco

from rlstable.device.trees import PyTree

_CONTACTS_OF_ALL = 2**17  # 64 for each of 2,048 environments
_CONTACTS = 32  # of one environment
_EQUALITY_ROWS, _CONTACT_ROWS = 6, 4  # most rows of an equality constraint, and those of a contact of condim 3


class Simulator(Protocol):
    """Starts and steps the physics of one environment."""

    def start(self, model: PyTree, **arrays: jax.Array) -> PyTree:
        """A first state with these arrays (`qpos` and others), with everything computed from them."""

    def steps(self, model: PyTree, state: PyTree, action: jax.Array, n_substeps: int = 1) -> PyTree:
        """Several physics steps with the same controls."""


class MjxSimulator:
    """MJX in JAX, or MJX-Warp; with `forces` it computes `cfrc_ext` after the steps, as Gymnasium does."""

    def __init__(self, model: mujoco.MjModel, impl: str = "jax", forces: bool = False):
        self._model = model
        self._arguments = {"impl": impl} | (warp_sizes(model) if impl == "warp" else {})
        self._forces = forces

    def start(self, model: PyTree, **arrays: jax.Array) -> PyTree:
        from mujoco import mjx

        return mjx.forward(model, mjx.make_data(self._model, **self._arguments).replace(**arrays))

    def steps(self, model: PyTree, state: PyTree, action: jax.Array, n_substeps: int = 1) -> PyTree:
        from mujoco import mjx

        def step(state: PyTree, _: None) -> tuple[PyTree, None]:
            return mjx.step(model, state), None

        last = jax.lax.scan(step, state.replace(ctrl=action), None, length=n_substeps)[0]
        return mjx.rne_postconstraint(model, last) if self._forces else last


def warp_sizes(model: mujoco.MjModel) -> dict[str, int]:
    """Room of MJX-Warp: contacts of all environments together, and rows of constraints of one environment.

    MJX-Warp drops what does not fit, and prints that it does.
    """
    limited = int(model.jnt_limited.sum()) + int(model.tendon_limited.sum())
    friction = int((model.dof_frictionloss > 0).sum()) + int((model.tendon_frictionloss > 0).sum())
    rows = limited + friction + _EQUALITY_ROWS * model.neq + _CONTACT_ROWS * _CONTACTS
    return {"naconmax": _CONTACTS_OF_ALL, "njmax": rows}
