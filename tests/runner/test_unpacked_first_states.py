"""Checkpoints whose cached first states are separate arrays; `config/test_renamed.py` resumes a run of that version."""

import dataclasses

import jax
import numpy as np
from toys import assemble, mesh, tiny_config

from rlstable.device import sharding
from rlstable.ppo.state import SPECS
from rlstable.runner.unpacked_first_states import has_unpacked_first_states, repacked, unpacked
from rlstable.supervise.snapshots import template


def test_first_states_of_the_previous_version_are_packed_bit_for_bit() -> None:
    _, state = assemble(tiny_config())
    state = sharding.place(state, mesh(), SPECS)
    old = unpacked(template(sharding.placeholders(state, mesh(), SPECS)))
    first = state.env_state.info["first_state"].unpacked()
    assert jax.tree.map(np.shape, old.env_state.info["first_obs"]) == first["obs"].shape
    values = {"first_pipeline_state": first["physics"], "first_obs": first["obs"]}
    info = {name: values.get(name, state.env_state.info.get(name)) for name in old.env_state.info}
    restored = dataclasses.replace(old, env_state=state.env_state.replace(info=info))
    packed, expected = repacked(restored).env_state, state.env_state
    assert jax.tree.structure(packed) == jax.tree.structure(expected)
    for got, saved in zip(jax.tree.leaves(packed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, saved)


def test_only_a_checkpoint_that_says_packed_has_packed_first_states() -> None:
    assert has_unpacked_first_states({"host": {}})
    assert not has_unpacked_first_states({"host": {}, "first_states": "packed"})
