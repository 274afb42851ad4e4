"""The last state that was judged good, in host memory and, where a checkpoint is of another one, beside it on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rlstable import sharding
from rlstable.ppo.state import SPECS, TrainState

# Environments start from clean resets after a rollback, and what was caught of them stays caught.
_LEFT_OUT = ("env_state", "reset_pool", "running_return", "incident")
# Where it stands in a checkpoint.
SAVED_AS = "last_good"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved(TrainState):
    """A training state with what is kept beside it, as a checkpoint holds them.

    Attributes:
        last_good: What is kept; None where that is the state itself.
    """

    last_good: Any = None


class LastGood:
    """A copy of everything but the environments, and the iteration it is of.

    Attributes:
        iteration: Iterations done when it was taken.
        step: Environment steps trained by then.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self.iteration = 0
        self.step = 0

    def keep(self, state: TrainState, iteration: int, step: int) -> None:
        """Takes a copy in place of the one there was; only of a state whose verdict was read and was good."""
        self._take(_parts(state), iteration, step)

    def restored(self, state: TrainState, mesh: Any) -> TrainState:
        """`state` with what was kept in its place, and its environments as they are. Its own arrays may be gone."""
        kept = dict(self._kept)
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.fault)):
            del kept["fault"]  # a fault on purpose is of the world, which does not go back
        placed = {name: sharding.place(part, mesh, getattr(SPECS, name)) for name, part in kept.items()}
        return dataclasses.replace(state, **placed)

    def save(self, state: TrainState, iteration: int) -> tuple[TrainState, dict[str, int] | None]:
        """What a checkpoint of `state` has to hold, so that a resumed run goes back to where this one would.

        Returns:
            The state, with what is kept beside it unless that is the same; and which one that is, for `load`.
        """
        if not self._kept or self.iteration == iteration:
            return state, None
        return Saved(**_fields(state), last_good=self._kept), {"iteration": self.iteration, "step": self.step}

    @staticmethod
    def template(state: TrainState) -> Saved:
        """The tree of a checkpoint that holds both; its part `SAVED_AS` may be missing there."""
        return Saved(**_fields(state), last_good=_parts(state))

    def load(self, saved: Saved, which: Mapping[str, int] | None, **tuning: Any) -> TrainState:
        """Takes back what `save` gave.

        Args:
            saved: What was read into the template.
            which: What `save` said of it.
            **tuning: Numbers of `Tuning` that are others from now on.

        Returns:
            The training state. Nothing is kept if it was good itself.
        """
        if which is not None:
            kept = saved.last_good
            self._take(kept | {"tuning": dataclasses.replace(kept["tuning"], **tuning)}, **which)
        return TrainState(**_fields(saved) | {"tuning": dataclasses.replace(saved.tuning, **tuning)})

    @property
    def empty(self) -> bool:
        """Whether nothing is kept."""
        return not self._kept

    def _take(self, parts: Mapping[str, Any], iteration: int, step: int) -> None:
        # The program is given its state's own memory to overwrite, which on a CPU is what `device_get` returns.
        self._kept = jax.tree.map(np.array, jax.device_get(dict(parts)))
        self.iteration, self.step = iteration, step


def _fields(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(TrainState)}


def _parts(state: TrainState) -> dict[str, Any]:
    return {name: part for name, part in _fields(state).items() if name not in _LEFT_OUT}
