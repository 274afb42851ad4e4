"""The last state that was judged good, in host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from rlstable import sharding
from rlstable.ppo.state import SPECS, TrainState

# Environments start from clean resets after a rollback, and what was caught of them stays caught.
_LEFT_OUT = ("env_state", "reset_pool", "running_return", "incident")


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
        parts = {
            field.name: getattr(state, field.name)
            for field in dataclasses.fields(TrainState)
            if field.name not in _LEFT_OUT
        }
        # The program is given its state's own memory to overwrite, which on a CPU is what `device_get` returns.
        self._kept = jax.tree.map(np.array, jax.device_get(parts))
        self.iteration, self.step = iteration, step

    def restored(self, state: TrainState, mesh: Any) -> TrainState:
        """`state` with what was kept in its place, and its environments as they are. Its own arrays may be gone."""
        kept = dict(self._kept)
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.fault)):
            del kept["fault"]  # a fault on purpose is of the world, which does not go back
        placed = {name: sharding.place(part, mesh, getattr(SPECS, name)) for name, part in kept.items()}
        return dataclasses.replace(state, **placed)
