"""Checkpoints with first states as separate arrays; `config/test_renamed.py` resumes such a run."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass, State, assemble, mesh, tiny_config

from rlstable.device import sharding
from rlstable.ppo.state import SPECS
from rlstable.runner.unpacked_first_states import (
    has_unpacked_first_states,
    with_packed_first_states,
    with_unpacked_first_states,
)
from rlstable.supervise.snapshots import template


class Mixed(PointMass):
    """A point whose physics has leaves of several types, some without elements, as MuJoCo's has."""

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        leaves = {"none": jnp.zeros(0, bool), "bytes": jnp.zeros(0, jnp.uint8), "count": jnp.arange(2, dtype=jnp.int32)}
        physics = state.pipeline_state
        return state.replace(pipeline_state=physics.replace(warm_start=leaves | {"own": physics.warm_start}))


@pytest.mark.parametrize(("devices", "dtype"), [(1, "float32"), (4, "float32"), (4, "float64")])
def test_separate_first_states_are_packed_bit_for_bit_where_the_training_program_needs_them(
    devices: int, dtype: str
) -> None:
    _, state = assemble(tiny_config(), Mixed())

    def cast(x: Any) -> Any:
        return x.astype(dtype) if x.dtype == jnp.float32 else x

    with jax.enable_x64(True):
        state = dataclasses.replace(state, incident=None, env_state=jax.tree.map(cast, state.env_state))
        first = state.env_state.info["first_state"]
        wide = jax.jit(lambda first: type(first).of(first.unpacked()))(first)
        state = dataclasses.replace(
            state, env_state=state.env_state.replace(info={**state.env_state.info, "first_state": wide})
        )
    assert set(wide.matrices) == {"bool", "uint8", "int32", dtype}
    shapes = sharding.placeholders(state, mesh(devices), SPECS)
    state = sharding.place(state, mesh(devices), SPECS)
    old = with_unpacked_first_states(template(shapes), mesh(devices))
    first = jax.device_get(state.env_state.info["first_state"]).unpacked()
    with jax.enable_x64(True):
        values = {
            name: jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), first[part], old.env_state.info[name])
            for name, part in {"first_pipeline_state": "physics", "first_obs": "obs"}.items()
        }
    info = {name: values.get(name, state.env_state.info.get(name)) for name in old.env_state.info}
    restored = dataclasses.replace(old, env_state=state.env_state.replace(info=info))
    packed = with_packed_first_states(restored, mesh(devices)).env_state
    with jax.enable_x64(True):
        jax.jit(lambda state: state).lower(shapes.env_state).compile()(packed)  # an error if a sharding differs
    assert jax.tree.structure(packed) == jax.tree.structure(state.env_state)
    for got, saved in zip(jax.tree.leaves(packed), jax.tree.leaves(state.env_state), strict=True):
        np.testing.assert_array_equal(got, saved)
        assert got.dtype == saved.dtype and got.sharding.is_equivalent_to(saved.sharding, saved.ndim)


def test_only_a_checkpoint_that_says_packed_has_packed_first_states() -> None:
    assert has_unpacked_first_states({"host": {}})
    assert not has_unpacked_first_states({"host": {}, "first_states": "packed"})
