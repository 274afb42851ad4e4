"""The state site: once per iteration, is what would be kept worth keeping?"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import StateConfig
from rlstable.guards.base import GuardState, Verdict, all_finite, count_first, no_trips


class StateContext(NamedTuple):
    """What the state site sees.

    Attributes:
        value: `(params, opt_state, normalizer)` at the end of the iteration.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class StateGuard:
    """Trips when parameters, optimizer state or observation statistics are not finite.

    A state that trips is never saved. `memory` counts trips in a row: when it reaches `patience` the run ends by name.
    """

    patience: int

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the training state was not finite."""
        return ("parameters", "optimizer", "normalizer")

    def init(self) -> GuardState:
        """No trips, none in a row."""
        return GuardState(no_trips(self.causes), jnp.zeros((), jnp.int32))

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        """Judges the training state."""
        fine = jnp.stack([all_finite(part) for part in ctx.value])
        ok = jnp.all(fine)
        in_a_row = jnp.where(ok, 0, state.memory + 1)
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(~fine), in_a_row))

    def exhausted(self, state: GuardState) -> jax.Array:
        """Whether patience has ended."""
        return state.memory >= self.patience


def state_guards(config: StateConfig) -> dict[str, StateGuard]:
    """The guards of the state site, by name."""
    return {"state": StateGuard(config.patience)} if config.enabled else {}
