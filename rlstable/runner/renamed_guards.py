"""Training states of older checkpoints, whose guards `finite_*` had other names; see `config.renamed.GUARDS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config.renamed import GUARDS
from rlstable.device.packed import PackedDict
from rlstable.supervise.snapshots import NAMES, SavedState

_OLD = {new: old for old, new in GUARDS.items()}


def has_old_names(settings: Mapping[str, Any]) -> bool:
    """Whether saved settings have the old names of guards."""
    return not GUARDS.keys().isdisjoint(settings.get("guards", {}))


def under_old_names(template: SavedState) -> SavedState:
    """The template with guard memories under their old names; trip counters have no names in a checkpoint."""
    return _change_parts(template, lambda part: {"guard_memory": _renamed(part["guard_memory"], _OLD)})


def under_new_names(saved: SavedState) -> SavedState:
    """Renames the guards of a state that was restored into `under_old_names`, and reorders the trip counters."""

    def renamed(part: Mapping[str, Any]) -> dict[str, Any]:
        counters = part["counters"]
        trips = dataclasses.replace(counters, trips=_reordered(counters.trips))
        return {"guard_memory": _renamed(part["guard_memory"], GUARDS), "counters": trips}

    return _change_parts(saved, renamed)


def _change_parts(saved: SavedState, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> SavedState:
    """Changes parts of a state and of the snapshots beside it."""
    parts = {field.name: getattr(saved, field.name) for field in dataclasses.fields(saved)}
    snapshots = {name: parts[name] | change(parts[name]) for name in NAMES if parts[name] is not None}
    return dataclasses.replace(saved, **change(parts), **snapshots)


def _renamed(memory: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in memory.items()}


def _reordered(trips: PackedDict) -> PackedDict:
    """Repacks counters from the order of the old names to the order of the new names."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(trips)):
        return trips  # of a snapshot that the checkpoint lacks
    lengths = dict(trips.layout)
    old = PackedDict(trips.whole, tuple(sorted((_OLD.get(name, name), length) for name, length in lengths.items())))

    def take(name: str) -> Any:
        place: Any = old.indices[_OLD.get(name, name)]
        return jax.tree.map(lambda x: jnp.atleast_1d(x[place]), trips.whole)

    parts = [take(name) for name, _ in trips.layout]
    return PackedDict(jax.tree.map(lambda *x: jnp.concatenate(x), *parts), trips.layout)
