"""Arrays of the model per simulation: equal to MuJoCo with such a model, refused where MuJoCo derives constants."""

from __future__ import annotations

import re
from typing import Any

import mujoco
import numpy as np
import pytest

from rlstable.envs.mujoco_batch import Simulations, Unsupported, set_arrays

ARM = """
<mujoco>
  <worldbody>
    <body>
      <joint type="hinge" axis="0 1 0" damping="0.1"/>
      <geom type="capsule" fromto="0 0 0 0.3 0 0.1" size="0.03"/>
      <body pos="0.3 0 0.1">
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" fromto="0 0 0 0.3 0 0" size="0.03"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""
FREE = '<mujoco><worldbody><body><freejoint/><geom type="box" size="0.1 0.2 0.3"/></body></worldbody></mujoco>'


def stepped(model: Any, frames: int) -> mujoco.MjData:
    data = mujoco.MjData(model)
    for _ in range(frames):
        mujoco.mj_step(model, data)
    return data


@pytest.mark.parametrize(
    ("name", "change"),
    [("body_mass", 3.0), ("body_inertia", 2.0), ("body_ipos", 1.5), ("dof_armature", None), ("dof_damping", 4.0),
     ("opt.gravity", 0.5)],
)  # fmt: skip
def test_simulation_with_its_own_array_steps_like_mujoco_with_this_model(name: str, change: float | None) -> None:
    """Compared with a model compiled as always, whose array was changed by hand."""
    model = mujoco.MjModel.from_xml_string(ARM)
    owner = model.opt if name.startswith("opt.") else model
    original = np.array(getattr(owner, name.removeprefix("opt.")), np.float64)
    changed = original + 0.05 if change is None else original * change
    simulations = Simulations(model, 1, ("geom_xpos",), (name,))
    inputs = {key: np.zeros((2, *simulations.shapes[key])) for key in ("time", "qpos", "qvel", "qacc_warmstart")}
    inputs |= {key: np.zeros((2, *simulations.shapes[key])) for key in ("qfrc_applied", "xfrc_applied")}
    inputs[name] = np.stack([original, changed])
    results = {key: np.empty((2, *simulations.shapes[key])) for key in ("qpos", "qvel", "geom_xpos")}
    simulations.step(inputs, results, 20)
    other = mujoco.MjModel.from_xml_string(ARM)
    set_arrays(other, {name: changed})
    for row, expected in enumerate((stepped(model, 20), stepped(other, 20))):
        np.testing.assert_allclose(results["qpos"][row], expected.qpos, atol=1e-9)
        np.testing.assert_allclose(results["geom_xpos"][row], expected.geom_xpos, atol=1e-9)
    assert np.abs(results["qpos"][0] - results["qpos"][1]).max() > 1e-4


@pytest.mark.parametrize("name", ["body_mass", "body_inertia", "body_ipos", "dof_armature"])
def test_mass_matrix_that_mujoco_reads_from_the_model_is_not_randomised(name: str) -> None:
    model = mujoco.MjModel.from_xml_string(FREE)
    said = f"it cannot randomise {name} of a free body or a slider without further bodies"
    with pytest.raises(Unsupported, match=re.escape(said)):
        Simulations(model, 1, (), (name,))
    Simulations(model, 1, (), ("geom_friction",))
