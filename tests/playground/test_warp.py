"""MJX-Warp on a CPU: one bad environment is quarantined alone, although all environments share contact arrays.

The first run compiles Warp's kernels, which takes a minute or two; `WARP_CACHE_PATH` keeps them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("mujoco_playground")
pytest.importorskip("warp")

import mujoco
from contacts import State
from mujoco import mjx
from mujoco.mjx.warp.types import DATA_NON_VMAP
from mujoco_playground import registry
from toys import step_alone, tiny_config

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.device.shared import Shared, without_shared
from rlstable.envs.objects import Environments
from rlstable.envs.shared_leaves import contact_norms, mark
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.ppo.guards import env_guards
from rlstable.replay.engines import step_again
from rlstable.replay.report import compare
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.incident import read

pytestmark = pytest.mark.usefixtures("quick_compile")

COUNT, STEPS, FAULT_AT, BAD = 4, 4, 1, 2
GUARDS = env_guards(GuardsConfig())
BALL = """
<mujoco>
  <option timestep="0.005" iterations="4" ls_iterations="4"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 0.1"><joint type="slide" axis="0 0 1"/><geom type="sphere" size="0.1" mass="1"/></body>
  </worldbody>
</mujoco>
"""


def cartpole(**overrides: Any) -> Any:
    return registry.load("CartpoleBalance", config_overrides=overrides)


def keys() -> jax.Array:
    return jax.random.split(jax.random.PRNGKey(0), COUNT)


@functools.cache
def unrolled(naconmax: int, faulty: bool) -> Any:
    """Validity `[STEPS, COUNT]`, the last states and the last guard states of a few steps."""
    env = VectorEnv(cartpole(naconmax=naconmax), 100, 1, GUARDS)

    @jax.jit
    def unroll() -> Any:
        first = env.reset(keys())
        pool = pool_of(first)

        def step(carry: Any, number: jax.Array) -> Any:
            state, guards = carry
            hit = (jnp.arange(COUNT) == BAD) & (number == FAULT_AT) & faulty
            qvel = jnp.where(hit[:, None], jnp.nan, state.data.qvel)
            state = state.replace(data=state.data.replace(qvel=qvel))
            action = jnp.full((COUNT, 1), 0.3)
            result = step_alone(env, state, action, pool, jax.random.fold_in(keys()[0], number), guards)
            return (result.state, result.guard_state), result.valid

        start = first, {name: guard.init() for name, guard in GUARDS.items()}
        (state, guards), valid = jax.lax.scan(step, start, jnp.arange(STEPS))
        return valid, state, guards

    return jax.device_get(unroll())


def test_shared_leaves_are_those_that_mjx_warp_does_not_batch() -> None:
    state = jax.eval_shape(VectorEnv(cartpole(naconmax=COUNT), 100, 1, GUARDS).reset, keys())
    impl = vars(state.data._impl)
    arrays = {name for name in DATA_NON_VMAP if not isinstance(impl[name], int)}
    assert {name for name, x in impl.items() if isinstance(x, Shared)} == arrays
    assert impl["contact__pos"].value.shape == (1, COUNT, 3)
    assert all(x.shape[0] == COUNT for x in jax.tree.leaves(without_shared(state)))


def test_physics_in_float64_is_refused_in_one_line(tmp_path: Path) -> None:
    env = cartpole()
    config = tiny_config(env={"source": "object", "name": "cartpole:Balance"}, precision={"matmul": "x64"})
    with pytest.raises(ConfigError) as error:
        TrainingLoop(config, tmp_path, environments=Environments(env, env))
    assert str(error.value) == (
        "precision.matmul: x64 needs physics in float64, and cartpole:Balance simulates with MJX-Warp, which computes "
        "in float32; set precision.matmul=highest, or use impl=jax"
    )


@pytest.mark.slow
@pytest.mark.parametrize("naconmax", [0, COUNT], ids=["the default", "as many contacts as environments"])
def test_fault_quarantines_exactly_one_environment_and_leaves_the_bits_of_the_others(naconmax: int) -> None:
    valid, state, guards = unrolled(naconmax, True)
    expected = np.ones((STEPS, COUNT), bool)
    expected[FAULT_AT, BAD] = False
    assert valid.tolist() == expected.tolist()
    assert guards["quarantine"].trips.sum() == 1
    others = np.arange(COUNT) != BAD
    ours, theirs = (jax.tree.leaves(without_shared(x)) for x in (state, unrolled(naconmax, False)[1]))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a[others], b[others])
    assert all(np.isfinite(x).all() for x in ours if np.issubdtype(x.dtype, np.floating))


@pytest.mark.slow
def test_contacts_are_attributed_to_the_environment_in_their_worldid() -> None:
    mj_model = mujoco.MjModel.from_xml_string(BALL)
    model = mjx.put_model(mj_model, impl="warp")
    zero = jnp.zeros(())

    def reset(height: jax.Array) -> State:
        data = mjx.make_data(mj_model, impl="warp", naconmax=COUNT, njmax=8)
        return State(mjx.forward(model, data.replace(qpos=height)), zero, zero, zero, {}, {})

    @jax.jit
    def norms(heights: jax.Array) -> Any:
        state = mark(jax.vmap(reset)(heights), reset, heights)
        data = state.pipeline_state
        impl = data._impl
        # The friction of every contact of the last environment is not a number.
        bad = impl.contact__worldid.value == COUNT - 1
        friction = jnp.where(bad[..., None], jnp.nan, impl.contact__friction.value)
        broken = data.replace(_impl=impl.replace(contact__friction=Shared(friction)))
        return contact_norms(state), contact_norms(state.replace(pipeline_state=broken))

    touching = jnp.array([[1.0], [-0.01], [2.0], [-0.02]])  # the others are in the air
    healthy, broken = norms(touching)
    assert (healthy > 0).tolist() == [False, True, False, True]
    assert jnp.isfinite(healthy).all()
    assert broken.tolist() == [0.0, float(healthy[1]), 0.0, np.inf]
    assert norms(touching[::-1])[1].tolist() == [float(healthy[3]), 0.0, float(healthy[1]), 0.0]


def settings(iterations: int, **sections: Any) -> Any:
    env = {
        "source": "import", "name": "mujoco_playground._src.dm_control_suite.cartpole:Balance",
        "kwargs": {"swing_up": False, "sparse": False}, "episode_length": 20,
    }  # fmt: skip
    defaults: dict[str, Any] = {
        "guards": {}, "env": env, "devices": 1, "total_steps": 64 * iterations, "logging": {"console": "off"},
        "eval": {"num_evals": 1, "num_envs": 2}, "supervise": {"incident": {"enabled": True}},
        "fault": {"site": "physics", "probability": 0.02}, "checkpoint": {"every": 1, "asynchronous": False},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


@pytest.mark.slow
def test_run_quarantines_evaluates_resumes_exactly_and_replays_its_incident(tmp_path: Path) -> None:
    whole = TrainingLoop(settings(2), tmp_path / "whole")
    whole.run()
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["guards/quarantine/trips"] == 1
    assert rows[-1]["eval/aborted_share"] == 0.0 and np.isfinite(rows[-1]["eval/episode_reward"])

    TrainingLoop(settings(1), tmp_path / "parts").run()
    resumed = TrainingLoop(settings(2, resume="auto"), tmp_path / "parts")
    resumed.run()
    # Records of incidents are not saved.
    states = [dataclasses.replace(run.single.state, incident=None) for run in (resumed, whole)]
    for ours, theirs in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))

    (folder,) = (tmp_path / "whole/incidents").iterdir()
    incident = read(folder)
    outcomes = step_again(incident)
    assert [outcome.engine for outcome in outcomes] == ["float32", "C MuJoCo"]
    assert compare(incident, outcomes).conclusion.startswith("not reproduced: the run injected fault.site=physics")
    np.testing.assert_allclose(*(outcome.arrays["data/qvel"] for outcome in outcomes), rtol=1e-3)
