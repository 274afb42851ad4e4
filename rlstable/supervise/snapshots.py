"""Copies of training states that a run may go back to: in host memory, and in checkpoints of other states.

- `last_good`: the last good state; a run whose guards lose patience rolls back to it.
- `best`: the state of the best return; a collapse of the return goes back to it.
- `candidate`: becomes the best state if the episodes after it are the best so far. A collapse can begin with the very
  update that follows the best episodes, so a state is best only by what was seen after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlstable.device import sharding
from rlstable.ppo.state import SPECS, TrainState

# Environments start from clean resets after a rollback, and what was caught of them stays caught.
_LEFT_OUT = ("env_state", "reset_pool", "running_return", "incident")
# The parts of a training state that learning changes.
_LEARNT = ("params", "opt_state", "normalizer", "guard_memory", "return_statistics")
# The snapshots, by the names that they have in a checkpoint.
NAMES = ("last_good", "best", "candidate")
# Origin of each snapshot in the JSON of a checkpoint: `{"iteration", "step"}`, or None if it is empty.
Origins = Mapping[str, Mapping[str, int] | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SavedState(TrainState):
    """A training state with the snapshots beside it, as a checkpoint holds them.

    Attributes:
        last_good: None if it is the state itself, or empty; the same for `best` and `candidate`.
        best: See the module.
        candidate: See the module.
    """

    last_good: Any = None
    best: Any = None
    candidate: Any = None


class Snapshot:
    """A copy of everything but the environments, and the iteration it is of.

    Attributes:
        iteration: Iterations done when it was taken.
        step: Environment steps trained by then.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self.iteration = 0
        self.step = 0

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._kept

    @property
    def policy(self) -> tuple[Any, Any]:
        """Parameters and observation statistics, on the host."""
        return self._kept["params"], self._kept["normalizer"]

    def keep(self, state: TrainState, iteration: int, step: int) -> None:
        """Takes a copy in place of the one there was; only of a state whose verdict was read and was good."""
        self._take(_parts(state), iteration, step)

    def become(self, other: Snapshot) -> None:
        """Takes what another snapshot holds; that one is empty afterwards."""
        self._kept, self.iteration, self.step = other._kept, other.iteration, other.step
        other.clear()

    def clear(self) -> None:
        """Keeps nothing."""
        self._kept, self.iteration, self.step = {}, 0, 0

    def restored(self, state: TrainState, mesh: Any) -> TrainState:
        """`state` with the kept parts; its environments do not change. Arrays of the replaced parts may be deleted."""
        kept = dict(self._kept)
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.fault)):
            del kept["fault"]  # injected faults are part of the environment, so a rollback does not undo them
        placed = {name: sharding.place(part, mesh, getattr(SPECS, name)) for name, part in kept.items()}
        return dataclasses.replace(state, **placed)

    def learnt(self, state: TrainState, mesh: Any) -> TrainState:
        """`state` with the networks, the optimizer and the statistics of the snapshot."""
        placed = {name: sharding.place(self._kept[name], mesh, getattr(SPECS, name)) for name in _LEARNT}
        return dataclasses.replace(state, **placed)

    def to_save(self, iteration: int) -> tuple[Any, dict[str, int] | None]:
        """The arrays that a checkpoint of this iteration needs besides its state, and which state they are of."""
        if self.empty:
            return None, None
        return (None if self.iteration == iteration else self._kept), {"iteration": self.iteration, "step": self.step}

    def load(self, kept: Any, origin: Mapping[str, int], state: TrainState, tuning: Mapping[str, Any]) -> None:
        """Takes back what `to_save` gave.

        Args:
            kept: The arrays; None where it was the state itself.
            origin: Which state they are of.
            state: The training state of the checkpoint.
            tuning: Numbers of `Tuning` that the configuration has changed.
        """
        parts = _parts(state) if kept is None else dict(kept)
        self._take(parts | {"tuning": dataclasses.replace(parts["tuning"], **tuning)}, **origin)

    def _take(self, parts: Mapping[str, Any], iteration: int, step: int) -> None:
        # The program is given its state's own memory to overwrite, which on a CPU is what `device_get` returns.
        self._kept = jax.tree.map(np.array, jax.device_get(dict(parts)))
        self.iteration, self.step = iteration, step


class Snapshots:
    """The three snapshots of a run: `last_good`, `best` and `candidate`.

    Attributes:
        last_good: See the module; likewise the next two.
        best: See the module.
        candidate: See the module.

    Args:
        mesh: The devices.
    """

    def __init__(self, mesh: Any):
        self._mesh = mesh
        self._by_name = {name: Snapshot() for name in NAMES}
        self.last_good = self._by_name["last_good"]
        self.best = self._by_name["best"]
        self.candidate = self._by_name["candidate"]

    def look(self, is_best: bool | None) -> None:
        """Makes the candidate the best state if the return after the candidate is the best so far.

        Args:
            is_best: Whether the return is the best so far; None if no return was measured.
        """
        if is_best and not self.candidate.empty:
            self.best.become(self.candidate)

    def forget_later(self, state: TrainState, iteration: int, step: int) -> None:
        """Drops snapshots ahead of a run that has rolled back.

        Snapshots are identified by their iteration, which occurs again after a rollback.

        Args:
            state: The state from which the run continues, under its remedy.
            iteration: Iterations done at `state`.
            step: Environment steps trained at `state`.
        """
        self.candidate.clear()
        if not self.best.empty and iteration <= self.best.iteration:
            # The state under its remedy, so that one checkpoint holds both.
            self.best.keep(state, iteration, step)

    def with_best_policy(self, state: TrainState) -> TrainState:
        """Replaces networks, optimizer and statistics by those of the best state, to end a run with.

        Counters stay: the steps were trained, and a later resume continues after them.
        """
        return state if self.best.empty else self.best.learnt(state, self._mesh)

    def save(self, state: TrainState, iteration: int) -> tuple[TrainState, Origins]:
        """Adds the snapshots to a checkpoint, so that a resumed run can roll back to the same states.

        Args:
            state: The training state.
            iteration: Its number.

        Returns:
            The state with the snapshots of other states, and the origins for `load`.
        """
        found = {name: snapshot.to_save(iteration) for name, snapshot in self._by_name.items()}
        beside: dict[str, Any] = {name: kept for name, (kept, _) in found.items() if kept is not None}
        saved = SavedState(**_fields(state), **beside) if beside else state
        return saved, {name: origin for name, (_, origin) in found.items()}

    def load(self, saved: SavedState, iteration: int, origins: Origins, **tuning: Any) -> TrainState:
        """Reads what `save` returned.

        Args:
            saved: A checkpoint, in the shape of `template`.
            iteration: Of the checkpoint.
            origins: Of the snapshots; a snapshot without an origin stays empty.
            **tuning: Numbers of `Tuning` that the configuration has changed.

        Returns:
            The training state.
        """
        state = TrainState(**_fields(saved))
        for name, snapshot in self._by_name.items():
            origin = origins.get(name)
            if origin is not None:
                kept = None if origin["iteration"] == iteration else getattr(saved, name)
                snapshot.load(kept, origin, state, tuning)
        return dataclasses.replace(state, tuning=dataclasses.replace(saved.tuning, **tuning))


def template(state: TrainState) -> SavedState:
    """The tree of a checkpoint that holds all snapshots; its parts `NAMES` may be missing there."""
    beside: dict[str, Any] = dict.fromkeys(NAMES, _parts(state))
    return SavedState(**_fields(state), **beside)


def _fields(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}


def _parts(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in _fields(state).items() if name not in _LEFT_OUT}
