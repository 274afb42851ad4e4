"""Training states of the previous version, which stored the cached first state as separate arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from rlstable.device.packed import PackedRows
from rlstable.supervise.snapshots import SavedState

# Value of the key `first_states` of a checkpoint that stores them packed; older checkpoints lack the key.
LAYOUT = "packed"


def has_unpacked_first_states(saved: Mapping[str, Any]) -> bool:
    """Whether the host data of a checkpoint comes from the previous version."""
    return saved.get("first_states") != LAYOUT


def unpacked(template: SavedState) -> SavedState:
    """The template of a checkpoint of the previous version."""
    info = dict(template.env_state.info)
    packed = info.pop("first_state")
    sharding = next(iter(packed.matrices.values())).sharding
    with jax.enable_x64(True):
        first = jax.eval_shape(PackedRows.unpacked, packed)
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), first)
    return _with_info(template, info | {"first_pipeline_state": first["physics"], "first_obs": first["obs"]})


def repacked(saved: SavedState) -> SavedState:
    """A state that was restored into `unpacked`, with packed first states."""
    info = dict(saved.env_state.info)
    first = {"physics": info.pop("first_pipeline_state"), "obs": info.pop("first_obs")}
    sharding = jax.tree.leaves(first)[0].sharding
    with jax.enable_x64(True):
        return _with_info(saved, info | {"first_state": jax.jit(PackedRows.of, out_shardings=sharding)(first)})


def _with_info(state: SavedState, info: dict[str, Any]) -> SavedState:
    return dataclasses.replace(state, env_state=state.env_state.replace(info=info))
