"""Copies of training states that a run may go back to: in host memory, and in checkpoints of other states.

- `last_good`: the last state that was judged good; guards that lose their patience go back to it.
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
class Saved(TrainState):
    """A training state with the snapshots beside it, as a checkpoint holds them.

    Attributes:
        last_good: None where it is the state itself, or there is none; likewise the next two.
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
        """`state` with what was kept in its place, and its environments as they are. Its own arrays may be gone."""
        kept = dict(self._kept)
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.fault)):
            del kept["fault"]  # a fault on purpose is of the world, which does not go back
        placed = {name: sharding.place(part, mesh, getattr(SPECS, name)) for name, part in kept.items()}
        return dataclasses.replace(state, **placed)

    def learnt(self, state: TrainState, mesh: Any) -> TrainState:
        """`state` with the networks, the optimizer and the statistics that were kept, and everything else as it is."""
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
            tuning: Numbers of `Tuning` that are others from now on.
        """
        parts = _parts(state) if kept is None else dict(kept)
        self._take(parts | {"tuning": dataclasses.replace(parts["tuning"], **tuning)}, **origin)

    def _take(self, parts: Mapping[str, Any], iteration: int, step: int) -> None:
        # The program is given its state's own memory to overwrite, which on a CPU is what `device_get` returns.
        self._kept = jax.tree.map(np.array, jax.device_get(dict(parts)))
        self.iteration, self.step = iteration, step


def save(snapshots: Mapping[str, Snapshot], state: TrainState, iteration: int) -> tuple[TrainState, Origins]:
    """Adds the snapshots to a checkpoint of `state`, so that a resumed run has the same states to go back to.

    Args:
        snapshots: By name.
        state: The training state.
        iteration: Its number.

    Returns:
        The state, with the snapshots that are of other states; and which each of them is, for `load`.
    """
    found = {name: own.to_save(iteration) for name, own in snapshots.items()}
    beside: dict[str, Any] = {name: kept for name, (kept, _) in found.items() if kept is not None}
    saved = Saved(**_fields(state), **beside) if beside else state
    return saved, {name: origin for name, (_, origin) in found.items()}


def template(state: TrainState) -> Saved:
    """The tree of a checkpoint that holds all snapshots; its parts `NAMES` may be missing there."""
    beside: dict[str, Any] = dict.fromkeys(NAMES, _parts(state))
    return Saved(**_fields(state), **beside)


def load(
    snapshots: Mapping[str, Snapshot], saved: Saved, iteration: int, origins: Origins, **tuning: Any
) -> TrainState:
    """Takes back what `save` gave.

    Args:
        snapshots: By name, to be filled.
        saved: What was read into the template.
        iteration: Of the checkpoint.
        origins: What `save` said of the snapshots; those that it does not name stay empty.
        **tuning: Numbers of `Tuning` that are others from now on.

    Returns:
        The training state.
    """
    state = TrainState(**_fields(saved))
    for name, own in snapshots.items():
        origin = origins.get(name)
        if origin is not None:
            own.load(None if origin["iteration"] == iteration else getattr(saved, name), origin, state, tuning)
    return dataclasses.replace(state, tuning=dataclasses.replace(saved.tuning, **tuning))


def _fields(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}


def _parts(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in _fields(state).items() if name not in _LEFT_OUT}
