"""Training states of older checkpoints, which store the cached first state as separate arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from rlstable.device import sharding
from rlstable.device.packed import PackedRows
from rlstable.supervise.snapshots import SavedState

# Value of the key `first_states` of a checkpoint that stores them packed; older checkpoints lack the key.
PACKED = "packed"


def has_unpacked_first_states(saved: Mapping[str, Any]) -> bool:
    """Whether the host data belongs to a checkpoint with first states as separate arrays."""
    return saved.get("first_states") != PACKED


def with_unpacked_first_states(template: SavedState, mesh: Mesh) -> SavedState:
    """The template of a checkpoint with first states as separate arrays."""
    info = dict(template.env_state.info)
    packed = info.pop("first_state")
    with jax.enable_x64(True):
        first = sharding.placeholders(jax.eval_shape(PackedRows.unpacked, packed), mesh, sharding.SPLIT)
    return _with_info(template, info | {"first_pipeline_state": first["physics"], "first_obs": first["obs"]})


def with_packed_first_states(saved: SavedState, mesh: Mesh) -> SavedState:
    """Packs the first states of a state that was restored into `with_unpacked_first_states`."""
    info = dict(saved.env_state.info)
    first = {"physics": info.pop("first_pipeline_state"), "obs": info.pop("first_obs")}
    with jax.enable_x64(True):
        # Not one sharding for all matrices: matrices without elements are replicated.
        like = sharding.placeholders(jax.eval_shape(PackedRows.of, first), mesh, sharding.SPLIT)
        pack = jax.jit(PackedRows.of, out_shardings=jax.tree.map(lambda x: x.sharding, like))
        return _with_info(saved, info | {"first_state": pack(first)})


def _with_info(state: SavedState, info: dict[str, Any]) -> SavedState:
    return dataclasses.replace(state, env_state=state.env_state.replace(info=info))
