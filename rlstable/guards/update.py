"""The update site: may this candidate replace the parameters?"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import UpdateConfig
from rlstable.guards.base import GuardState, Verdict, all_finite, count_first, no_trips


class UpdateContext(NamedTuple):
    """What the update site sees.

    Attributes:
        value: The candidate, `(params, opt_state)`.
        gradients: Averaged over devices, before clipping.
        gradient_norm: Their global norm.
        searching: True where an overflow is part of the loss scale's search, which has not come to its floor; the
            candidate is rejected all the same, but nothing is wrong.
    """

    value: Any
    gradients: Any
    gradient_norm: jax.Array
    searching: jax.Array | bool = False


@dataclasses.dataclass(frozen=True)
class UpdateGuard:
    """Trips when gradients, candidate parameters or candidate optimizer state are not finite: all or nothing.

    Gradients are judged by their global norm, before clipping, which turns inf into NaN. Its square overflows at
    1.8e19, so that the finite 1e20 that would freeze Adam's second moment for good is rejected too.
    """

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the candidate was not finite."""
        return ("gradient", "parameters", "optimizer")

    def init(self) -> GuardState:
        """No trips."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        """Judges the candidate; the caller keeps the old one where the verdict is bad."""
        params, opt_state = ctx.value
        fine = jnp.stack([jnp.isfinite(ctx.gradient_norm), all_finite(params), all_finite(opt_state)])
        wrong = ~fine if ctx.searching is False else ~fine & ~ctx.searching
        return Verdict(ctx.value, jnp.all(fine), state._replace(trips=state.trips + count_first(wrong)))


def update_guards(config: UpdateConfig) -> dict[str, UpdateGuard]:
    """The guards of the update site, by name."""
    return {"update": UpdateGuard()} if config.enabled else {}
