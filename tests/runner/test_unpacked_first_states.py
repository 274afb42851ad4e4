"""Checkpoints whose cached first states are separate arrays; `config/test_renamed.py` resumes a run of that version."""

import dataclasses

import jax
import numpy as np
import pytest
from toys import assemble, mesh, tiny_config

from rlstable.device import sharding
from rlstable.ppo.state import SPECS
from rlstable.runner.unpacked_first_states import has_unpacked_first_states, repacked, unpacked
from rlstable.supervise.snapshots import template


@pytest.mark.parametrize("devices", [1, 4])
def test_first_states_of_the_previous_version_are_packed_bit_for_bit_on_their_devices(devices: int) -> None:
    _, state = assemble(tiny_config())
    state = sharding.place(dataclasses.replace(state, incident=None), mesh(devices), SPECS)
    old = unpacked(template(sharding.placeholders(state, mesh(devices), SPECS)))
    first = jax.device_get(state.env_state.info["first_state"]).unpacked()
    names = {"first_pipeline_state": "physics", "first_obs": "obs"}
    values = {
        name: jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), first[part], old.env_state.info[name])
        for name, part in names.items()
    }
    assert {x.shape for x in jax.tree.leaves(values)} == {x.shape for x in jax.tree.leaves(first)}
    info = {name: values.get(name, state.env_state.info.get(name)) for name in old.env_state.info}
    restored = dataclasses.replace(old, env_state=state.env_state.replace(info=info))
    packed, expected = repacked(restored).env_state, state.env_state
    assert jax.tree.structure(packed) == jax.tree.structure(expected)
    for got, saved in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, saved)
        assert got.sharding == saved.sharding


def test_only_a_checkpoint_that_says_packed_has_packed_first_states() -> None:
    assert has_unpacked_first_states({"host": {}})
    assert not has_unpacked_first_states({"host": {}, "first_states": "packed"})
