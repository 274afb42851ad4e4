"""Physics in float64 and everything else in float32, checked on the program and on numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass, mesh, tiny_config

from rlstable.device.packed import PackedRows
from rlstable.envs.float64 import Float64Physics
from rlstable.runner.setup import TrainingSetup

WIDE = {jnp.dtype(jnp.float64), jnp.dtype(jnp.int64), jnp.dtype(jnp.uint64)}


@pytest.fixture(scope="module")
def assembly() -> TrainingSetup:
    """Every guard on, at the level of float64 physics."""
    return TrainingSetup(tiny_config(guards={}, precision={"matmul": "x64"}), mesh())


def test_only_the_physics_state_is_float64(assembly: TrainingSetup) -> None:
    shapes = assembly.shapes()
    wide = {
        jax.tree_util.keystr(path).split("[")[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if leaf.dtype in WIDE and "pipeline_state" not in jax.tree_util.keystr(path)
    }
    assert wide == {".reset_pool.matrices", ".env_state.info"}
    with jax.enable_x64(True):
        first = jax.eval_shape(PackedRows.unpacked, shapes.env_state.info["first_state"])
    physics = jax.tree.leaves((shapes.env_state.pipeline_state, first["physics"]))
    assert {leaf.dtype for leaf in physics} == {jnp.dtype(jnp.float64)}
    assert {leaf.dtype for leaf in jax.tree.leaves(first["obs"])} == {jnp.dtype(jnp.float32)}


def test_simulation_in_float64_equals_numpy() -> None:
    """A hundred steps; float32 has an error a thousand times larger."""
    wide, narrow = Float64Physics(PointMass(bound=1e3)), PointMass(bound=1e3)
    actions = np.random.default_rng(0).uniform(-1, 1, (100, 2)).astype(np.float32)

    def play(env: Any) -> Any:
        def body(state: Any, action: jax.Array) -> Any:
            state = env.step(state, action)
            return state, state.obs

        return jax.lax.scan(body, env.reset(jax.random.PRNGKey(0)), actions)

    with jax.enable_x64(True):

        def narrowly() -> Any:
            with jax.enable_x64(False):
                return play(wide)

        state, observations = jax.jit(narrowly)()
        first = jax.jit(lambda: wide.reset(jax.random.PRNGKey(0)).pipeline_state)()
        q, qd = np.asarray(first.q), np.asarray(first.qd)
    assert state.pipeline_state.q.dtype == np.float64
    assert observations.dtype == state.reward.dtype == state.done.dtype == jnp.float32
    for action in actions.astype(np.float64):
        qd = 0.9 * qd + 0.3 * np.clip(action, -1.0, 1.0)
        q = q + 0.3 * qd
    np.testing.assert_allclose(np.asarray(state.pipeline_state.q), q, rtol=1e-13)
    assert jax.jit(play, static_argnums=0)(narrow)[0].pipeline_state.q.dtype == jnp.float32
