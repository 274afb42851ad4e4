"""Tasks of MuJoCo Playground on C MuJoCo: equal to MJX, chosen where possible, refused in one line elsewhere."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("mujoco_playground")

sys.path.append(str(Path(__file__).parents[1] / "envs"))

from mujoco import mjx
from mujoco_playground import locomotion, manipulation
from mujoco_playground._src import dm_control_suite
from parity import differences

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import validate
from rlstable.envs.load import load

pytestmark = pytest.mark.usefixtures("quick_compile")

# Greatest relative difference of an observation in a thousand random steps, and the 99th percentile. The solver of some
# tasks stops after 2 to 4 iterations, before it has converged, and MJX keeps at most 8 contacts of the humanoid.
PRECISE = (2e-4, 2e-5)
BOUNDS = {"Finger": (2e-2, 1e-2), "Hopper": (0.6, 2e-5), "Walker": (0.3, 1e-3), "Humanoid": (1.0, 3e-2)}
FAST = ("CartpoleBalance", "ReacherEasy")  # the second has a body that is moved in `reset`


def task(name: str, **settings: Any) -> EnvConfig:
    return validate(EnvConfig, {"source": "playground", "name": name, **settings})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in dm_control_suite.ALL_ENVS
        # The others differ from one of these in the reward only.
        if not name.endswith(("Sparse", "Hard", "Stand", "Walk"))
    ],
)
def test_native_step_of_a_task_equals_that_of_mjx(name: str) -> None:
    found = differences(task(name), resets=True)
    most, of_99 = next((value for prefix, value in BOUNDS.items() if name.startswith(prefix)), PRECISE)
    assert found["obs"].most <= most and found["obs"].of_99 <= of_99
    assert found["reward"].most <= 0.05 and found["reward"].of_99 <= 1e-3
    assert found["done"].most == 0.0
    # The cheetah's first state has taken 200 physics steps.
    assert found["reset/obs"].most <= (1e-3 if name == "CheetahRun" else 1e-6)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("SpotGetup", "LeapCubeReorient") else pytest.mark.slow)
        for name in (*locomotion.ALL_ENVS, *manipulation.ALL_ENVS)
    ],
)
def test_robot_of_playground_steps_in_c_mujoco(name: str) -> None:
    loaded = load(task(name, backend="native"))
    state = jax.jit(jax.vmap(loaded.env.reset))(jax.random.split(jax.random.PRNGKey(0), 2))
    after = jax.jit(jax.vmap(loaded.env.step))(state, jnp.zeros((2, loaded.env.action_size)))
    assert loaded.backend == "native"
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves((after.obs, after.reward)))
    assert not np.array_equal(after.data.qvel, state.data.qvel)


def test_auto_takes_c_mujoco_unless_an_implementation_of_mjx_is_chosen() -> None:
    assert load(task("CartpoleBalance", backend="auto")).backend == "native"
    assert load(task("CartpoleBalance", backend="auto", impl="jax")).backend == "mjx"
    assert load(task("CartpoleBalance")).backend == "mjx"


def test_task_that_steps_in_another_way_is_refused_and_auto_takes_mjx(monkeypatch: pytest.MonkeyPatch) -> None:
    cartpole = sys.modules["mujoco_playground._src.dm_control_suite.cartpole"]

    def step(self: Any, state: Any, action: Any) -> Any:
        return state.replace(data=mjx.step(self.mjx_model, state.data.replace(ctrl=action)))

    step = types.FunctionType(step.__code__, {"mjx": types.SimpleNamespace(**vars(mjx))}, "step")
    monkeypatch.setattr(cartpole.Balance, "step", step)
    with pytest.raises(ConfigError, match=r"^env\.backend: native cannot simulate CartpoleBalance: ") as refused:
        load(task("CartpoleBalance", backend="native"))
    assert "\n" not in str(refused.value)
    loaded = load(task("CartpoleBalance", backend="auto"))
    assert loaded.backend == "mjx" and loaded.fallback_reason.startswith("native cannot simulate CartpoleBalance: ")


def test_native_go1_steps_under_its_own_randomised_models() -> None:
    env = load(task("Go1JoystickFlatTerrain", backend="native", randomize=True)).env
    assert set(env.randomized) == {
        "geom_friction", "body_ipos", "body_mass", "qpos0", "dof_frictionloss", "dof_armature",
    }  # fmt: skip
    state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), 4))
    same = state.replace(data=jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), state.data))
    step = jax.jit(functools.partial(jax.vmap(env.step), action=jnp.zeros((4, env.action_size))))
    stepped = step(same)
    assert len(np.unique(np.asarray(stepped.data.qvel), axis=0)) == 4
    for name, array in state.info["model"].items():
        np.testing.assert_array_equal(stepped.info["model"][name], array)
