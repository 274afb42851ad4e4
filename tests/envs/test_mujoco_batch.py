"""C MuJoCo in NumPy: a result depends on its row alone, and rows with a warning of MuJoCo become bad numbers."""

from __future__ import annotations

import re
from typing import Any

import mujoco
import numpy as np
import pytest
from ball import MODEL

from rlstable.envs.mujoco_batch import INPUT_ARRAYS, LINK_ARRAYS, STATE_ARRAYS, Simulations, Unsupported, set_arrays
from rlstable.envs.mujoco_model import without_warnings

ROWS, FRAMES = 33, 4


OPTION = '<option timestep="0.005" iterations="30" ls_iterations="20"/>'


def model(gear: float = 3.0, old: str = "", new: str = "") -> Any:
    """The stick; with something in the place of something else."""
    text = MODEL.format(gear=gear)
    assert old in text
    return mujoco.MjModel.from_xml_string(text.replace(old, new) if old else text)


def started(simulations: Simulations, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Some first states, in float32, as a program has them."""
    rng = np.random.default_rng(0)
    sized = [name for name in (*STATE_ARRAYS, *INPUT_ARRAYS) if np.prod(simulations.shapes[name])]
    state = {name: np.zeros((rows, *simulations.shapes[name]), np.float32) for name in (*sized, *LINK_ARRAYS)}
    qpos, qvel = (rng.uniform(-0.3, 0.3, state[name].shape) for name in ("qpos", "qvel"))
    simulations.start({"qpos": qpos, "qvel": qvel}, state)
    return state


def stepped(simulations: Simulations, state: dict[str, np.ndarray], steps: int = 20) -> dict[str, np.ndarray]:
    """That many steps later, under controls that belong to the row."""
    state = {name: array.copy() for name, array in state.items()}
    given = {name: array for name, array in state.items() if name not in LINK_ARRAYS}
    results = {name: array for name, array in state.items() if name not in INPUT_ARRAYS}
    for step in range(steps):
        state["ctrl"][..., 0] = np.sin(step + 10.0 * state["qpos"][..., 3])
        simulations.step(given, results, FRAMES)
    return state


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, array in one.items():
        np.testing.assert_array_equal(array, other[name], err_msg=name)


def test_simulations_do_not_depend_on_order_or_threads():
    reference = Simulations(model(), 1)
    first = started(reference)
    expected = stepped(reference, first)
    assert not np.array_equal(expected["qpos"], first["qpos"]) and np.isfinite(expected["qpos"]).all()
    order = np.random.default_rng(1).permutation(ROWS)
    for threads in (2, 5):
        simulations = Simulations(model(), threads)
        assert_same(stepped(simulations, first), expected)
        permuted = stepped(simulations, {name: array[order] for name, array in first.items()})
        assert_same(permuted, {name: array[order] for name, array in expected.items()})


@pytest.mark.parametrize(
    ("field", "value", "mended"),
    [("qpos", np.nan, False), ("qvel", -1e11, False), ("ctrl", np.nan, True), ("qfrc_applied", 1e30, False)],
)  # fmt: skip
def test_row_with_a_mujoco_warning_becomes_bad_and_other_rows_do_not_change(field, value, mended, here):
    """No clean state and no zero controls hide the warning, and no log file is written."""
    simulations = Simulations(model(), 2)
    first = started(simulations)
    given = {name: array for name, array in first.items() if name not in LINK_ARRAYS}
    results = {name: array.copy() for name, array in first.items() if name not in INPUT_ARRAYS}
    healthy = {name: array.copy() for name, array in results.items()}
    simulations.step(given, healthy, FRAMES)
    given[field] = given[field].copy()
    given[field][7] = value
    for _ in range(3):  # a warning does not stick to the place
        simulations.step(given, results, FRAMES)
    assert is_bad(results)[7]
    assert all(np.isnan(array[7]).all() for array in results.values()) == mended
    others = np.arange(ROWS) != 7
    for name, array in results.items():
        np.testing.assert_array_equal(array[others], healthy[name][others])
    given[field][7] = first[field][7]
    simulations.step(given, results, FRAMES)
    assert_same(results, healthy)
    assert list(here.iterdir()) == []


def test_handler_of_a_user_for_mujoco_warnings_is_restored():
    own = [].append
    mujoco.set_mju_user_warning(own)
    with without_warnings():
        assert mujoco.get_mju_user_warning() != own
    assert mujoco.get_mju_user_warning() == own
    mujoco.set_mju_user_warning(None)


def is_bad(results: dict[str, np.ndarray]) -> np.ndarray:
    """By MuJoCo's own measure, bool `[ROWS]`."""
    judged = np.concatenate([results[name] for name in ("qpos", "qvel", "qacc_warmstart")], axis=1)
    return ~(np.abs(judged) <= 1e10).all(axis=1)


def test_simulation_without_memory_for_its_constraints_gives_nan():
    """MuJoCo would drop constraints, or raise."""
    small = model(old=OPTION, new='<size memory="2K"/>')
    simulations = Simulations(small, 2)
    state = started(simulations)
    assert np.isnan(stepped(simulations, state, 60)["qpos"]).all()


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


def stepped_alone(model: Any, frames: int) -> mujoco.MjData:
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
    for row, expected in enumerate((stepped_alone(model, 20), stepped_alone(other, 20))):
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
