"""Copies of training states that a run may roll back to, in host memory and in checkpoints.

- `last_good`: the last good state; the run rolls back to it when guards lose patience.
- `best`: the state with the best return; the run rolls back to it when the return collapses.
- `candidate`: becomes the best state if the episodes after it are the best so far. A collapse can begin with the update
  right after the best episodes, so only later episodes can show that a state is the best.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlstable.device import sharding
from rlstable.ppo.state import SPECS, TrainState

# Environments are reset after a rollback, and captured incidents stay captured.
_LEFT_OUT = ("env_state", "reset_pool", "incident")
# The parts of a training state that learning changes.
_LEARNED = ("params", "opt_state", "normalizer", "guard_memory", "reward_magnitudes")
# The snapshots, by the names that they have in a checkpoint.
NAMES = ("last_good", "best", "candidate")
# Origin of each snapshot in the JSON of a checkpoint: `{"iteration", "step"}`, or None if it is empty.
Origins = Mapping[str, Mapping[str, int] | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedState(TrainState):
    """A training state with the snapshots beside it; None for a snapshot that is the state itself, or empty."""

    last_good: Any = None
    best: Any = None
    candidate: Any = None


class Snapshot:
    """A copy of a training state without its environments."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self.iteration = 0
        self.step = 0

    @property
    def empty(self) -> bool:
        return not self._parts

    @property
    def policy(self) -> tuple[Any, Any]:
        """Parameters and observation statistics, on the host."""
        return self._parts["params"], self._parts["normalizer"]

    def keep(self, state: TrainState, iteration: int, step: int) -> None:
        self._set(_parts(state), iteration, step)

    def take_from(self, other: Snapshot) -> None:
        """Takes the copy of another snapshot, which is empty afterwards."""
        self._parts, self.iteration, self.step = other._parts, other.iteration, other.step
        other.clear()

    def clear(self) -> None:
        self._parts, self.iteration, self.step = {}, 0, 0

    def restored(self, state: TrainState, mesh: Any) -> TrainState:
        """Replaces the copied parts of `state`, whose arrays may be deleted; its environments do not change."""
        parts = dict(self._parts)
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.fault)):
            del parts["fault"]  # injected faults are part of the environment, so a rollback does not undo them
        placed = {name: sharding.place(part, mesh, getattr(SPECS, name)) for name, part in parts.items()}
        return dataclasses.replace(state, **placed)

    def with_learned_parts(self, state: TrainState, mesh: Any) -> TrainState:
        placed = {name: sharding.place(self._parts[name], mesh, getattr(SPECS, name)) for name in _LEARNED}
        return dataclasses.replace(state, **placed)

    def to_save(self, iteration: int) -> tuple[Any, dict[str, int] | None]:
        """The arrays that a checkpoint of this iteration needs besides its state, and their origin."""
        if self.empty:
            return None, None
        return (None if self.iteration == iteration else self._parts), {"iteration": self.iteration, "step": self.step}

    def load(self, saved: Any, origin: Mapping[str, int], state: TrainState, tuning: Mapping[str, Any]) -> None:
        """Loads the result of `to_save`, with the numbers of `Tuning` that the configuration has changed."""
        parts = _parts(state) if saved is None else dict(saved)
        self._set(parts | {"tuning": dataclasses.replace(parts["tuning"], **tuning)}, **origin)

    def _set(self, parts: Mapping[str, Any], iteration: int, step: int) -> None:
        # On a CPU `device_get` returns the memory of the state, which the next iteration overwrites.
        self._parts = jax.tree.map(np.array, jax.device_get(dict(parts)))
        self.iteration, self.step = iteration, step


class Snapshots:
    """The three snapshots of a run: `last_good`, `best` and `candidate`."""

    def __init__(self, mesh: Any):
        self._mesh = mesh
        self._by_name = {name: Snapshot() for name in NAMES}
        self.last_good = self._by_name["last_good"]
        self.best = self._by_name["best"]
        self.candidate = self._by_name["candidate"]

    def promote_candidate(self, is_best: bool | None) -> None:
        """Makes the candidate the best state if the return after it is the best so far; None if it is not measured."""
        if is_best and not self.candidate.empty:
            self.best.take_from(self.candidate)

    def forget_later(self, state: TrainState, iteration: int, step: int) -> None:
        """Drops snapshots ahead of a run that has rolled back to `state` under its remedy.

        Snapshots are identified by their iteration, which occurs again after a rollback.
        """
        self.candidate.clear()
        if not self.best.empty and iteration <= self.best.iteration:
            # Keep the state under its remedy: the best state and the present one are then the same in a checkpoint.
            self.best.keep(state, iteration, step)

    def with_best_policy(self, state: TrainState) -> TrainState:
        """Replaces networks, optimizer and statistics by those of the best state, at the end of a run.

        Counters stay: the steps were trained, and a later resume continues from them.
        """
        return state if self.best.empty else self.best.with_learned_parts(state, self._mesh)

    def save(self, state: TrainState, iteration: int) -> tuple[TrainState, Origins]:
        """The state with the snapshots of other states, as a checkpoint holds them, and the origins for `load`."""
        by_name = {name: snapshot.to_save(iteration) for name, snapshot in self._by_name.items()}
        others: dict[str, Any] = {name: parts for name, (parts, _) in by_name.items() if parts is not None}
        saved = SavedState(**_fields(state), **others) if others else state
        return saved, {name: origin for name, (_, origin) in by_name.items()}

    def load(self, saved: SavedState, iteration: int, origins: Origins, **tuning: Any) -> TrainState:
        """Loads a checkpoint in the shape of `template` and returns the training state.

        A snapshot without an origin stays empty. `tuning` has the numbers of `Tuning` that the configuration changed.
        """
        state = TrainState(**_fields(saved))
        for name, snapshot in self._by_name.items():
            origin = origins.get(name)
            if origin is not None:
                parts = None if origin["iteration"] == iteration else getattr(saved, name)
                snapshot.load(parts, origin, state, tuning)
        return dataclasses.replace(state, tuning=dataclasses.replace(saved.tuning, **tuning))


def template(state: TrainState) -> SavedState:
    """The tree of a checkpoint with all snapshots; a checkpoint may lack the parts `NAMES`."""
    snapshots: dict[str, Any] = dict.fromkeys(NAMES, _parts(state))
    return SavedState(**_fields(state), **snapshots)


def _fields(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}


def _parts(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in _fields(state).items() if name not in _LEFT_OUT}
