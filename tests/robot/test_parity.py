"""Every term has the same value in MJX and in C MuJoCo, after the same physics steps from the same state."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
from moments import moment
from mujoco import mjx
from test_term_values import ARM, CART_POLE, CASES, QUADRUPED, SLOW, Case, trunk, turned

from rlstable.envs.mujoco_batch import DERIVED_ARRAYS, Simulations
from rlstable.envs.native import Pipeline
from rlstable.envs.simulator import MjxSimulator
from rlstable.robot.model import Robot

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS = 3
# A state in motion, with contacts, of each robot: positions, velocities, controls.
STATES: dict[Robot, tuple[Any, Any, Any]] = {
    QUADRUPED: (
        turned(QUADRUPED, 0, 8.0, -0.004),
        trunk(0.3, -0.2, 0.1, 0.5, -0.4, 0.6) + np.linspace(-0.5, 0.5, 18),
        QUADRUPED.of_actuators("home") + np.linspace(-0.2, 0.2, 12),
    ),
    CART_POLE: ([0.3, 0.4], [1.0, -2.0], [0.7]),
    SLOW: ([0.1], [2.0], [0.5]),
    ARM: ([0.4, -0.8], [1.0, 2.0], [0.5, -0.5]),
}
# The arrays that terms read, so that one call of each engine serves all tests.
READ = tuple(sorted(DERIVED_ARRAYS & {
    "xpos", "xmat", "sensordata", "site_xpos", "geom_xpos", "subtree_com", "qfrc_actuator", "actuator_force",
}))  # fmt: skip
IMPLEMENTATIONS = {"MJX": "jax", "MJX-Warp": "warp"}


@functools.cache
def stepped(robot: Robot, engine: str) -> Any:
    """The physics state after a few steps."""
    if engine in IMPLEMENTATIONS:
        impl = IMPLEMENTATIONS[engine]
        simulator, model = MjxSimulator(robot.model, impl), mjx.put_model(robot.model, impl=impl)
    else:
        simulator, model = Pipeline(Simulations(robot.model, 1, READ)), None

    def run(qpos: jax.Array, qvel: jax.Array, ctrl: jax.Array) -> Any:
        return simulator.steps(model, simulator.start(model, qpos=qpos, qvel=qvel, ctrl=ctrl), ctrl, STEPS)

    return jax.jit(run)(*(jnp.asarray(part, jnp.float32) for part in STATES[robot]))


def assert_same_as_in_c_mujoco(engine: str, term: Any, case: Case) -> None:
    arguments = moment(case.robot, **(case.past or {}))
    mine, other = (
        np.asarray(term(*arguments._replace(data=stepped(case.robot, each)), **(case.parameters or {})))
        for each in (engine, "C MuJoCo")
    )
    assert mine.dtype == other.dtype and mine.shape == other.shape
    np.testing.assert_allclose(mine, other, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("term, case", CASES)
def test_term_is_the_same_in_mjx_and_c_mujoco(term: Any, case: Case) -> None:
    assert_same_as_in_c_mujoco("MJX", term, case)


@pytest.mark.slow
@pytest.mark.parametrize("term, case", CASES)
def test_term_is_the_same_in_mjx_warp_and_c_mujoco(term: Any, case: Case) -> None:
    pytest.importorskip("warp")
    assert_same_as_in_c_mujoco("MJX-Warp", term, case)


def test_states_of_the_comparison_are_in_motion_and_in_contact() -> None:
    lag = float(SLOW.activations(stepped(SLOW, "C MuJoCo"))[0])
    assert lag == pytest.approx(0.5 * (1 - np.exp(-0.1 * STEPS)), rel=1e-5)
    data = stepped(QUADRUPED, "C MuJoCo")
    assert float(jnp.abs(data.qvel).max()) > 0.1
    assert float(QUADRUPED.foot_contacts(data).sum()) > 0
    assert QUADRUPED.model.sensor_type[-1] == mujoco.mjtSensor.mjSENS_CONTACT
