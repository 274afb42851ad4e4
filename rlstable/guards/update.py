"""The update site: may this candidate replace the parameters?"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import GuardsConfig
from rlstable.guards import outlier
from rlstable.guards.base import Guard, GuardState, Verdict, all_finite, count_first, no_trips, norm_within

_RATE = 0.05  # of a new norm in the running mean of logarithms


class UpdateContext(NamedTuple):
    """Context of the update site.

    Attributes:
        value: The candidate, `(params, opt_state)`; parameters and what is laid out as they are (Adam's moments) may be
            vectors `[n]`, all layers one after another (`rlstable.ppo.flat`).
        gradient_norm: Global norm of the gradient, averaged over devices, before clipping.
        update_norm: Global norm of the step from the old parameters to the candidate.
        parameter_norm: Global norm of the old parameters.
    """

    value: Any
    gradient_norm: jax.Array
    update_norm: jax.Array
    parameter_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class FiniteUpdateGuard:
    """Trips when gradient, candidate parameters or candidate optimizer state are bad: all or nothing.

    Three norms tell, which are computed anyway. A gradient is judged before clipping, which turns inf into NaN; its
    squared norm overflows at 1.8e19, so that the finite 1e20 that would freeze Adam's second moment for good is
    rejected too. A finite one bounds every new moment, and a finite step every new parameter, given that the old ones
    were finite, which the state guard verifies. `thorough` looks at each of them all the same, in a second pass over
    the candidate.

    Attributes:
        max_parameter_norm: Largest norm of the parameters; None for any finite one.
        thorough: Whether to look at every number of the candidate.
    """

    max_parameter_norm: float | None
    thorough: bool

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the candidate was bad."""
        return ("gradient", "parameters", "optimizer")

    def init(self) -> GuardState:
        """No trips."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        """Judges the candidate; the caller keeps the old one where the verdict is bad."""
        params, opt_state = ctx.value
        reach = ctx.parameter_norm + ctx.update_norm  # the triangle inequality's bound of the new norm
        sane = jnp.isfinite(reach)
        if self.max_parameter_norm is not None:
            sane &= reach <= self.max_parameter_norm
        whole = jnp.ones((), bool)
        if self.thorough:
            sane &= norm_within(params, self.max_parameter_norm)
            whole = all_finite(opt_state)
        fine = jnp.stack([jnp.isfinite(ctx.gradient_norm), sane, whole])
        return Verdict(ctx.value, jnp.all(fine), state._replace(trips=state.trips + count_first(~fine)))


@dataclasses.dataclass(frozen=True)
class SpikeGuard:
    """Trips when the gradient's norm is far beyond the usual one: the geometric running mean of accepted norms.

    Clipping would bound such a step, but its direction is that of one bad sample. A norm that is not finite is the
    update guard's to judge.

    Attributes:
        factor: How many times the usual norm is a spike.
    """

    factor: float

    @property
    def causes(self) -> tuple[str, ...]:
        """The only one."""
        return ("spike",)

    def init(self) -> GuardState:
        """No trips, no norm seen."""
        return GuardState(no_trips(self.causes), outlier.nothing_yet())

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        """Judges the gradient; a rejected norm moves nothing but the allowance."""
        norm, usual = ctx.gradient_norm, state.memory
        ok = outlier.within(norm, usual, self.factor)
        spike, new = ~ok & jnp.isfinite(norm), ok & (norm > 0)
        # Logarithms of what is positive and finite, so that neither branch of the choice is NaN.
        seen = jnp.where(new, norm, 1.0)
        before = jnp.where(usual.level > 0, usual.level, seen)
        level = jnp.exp((1.0 - _RATE) * jnp.log(before) + _RATE * jnp.log(seen))
        level = jnp.where(new, level, usual.level)
        memory = outlier.follow(usual, level, spike)
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(spike[None]), memory))


def update_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the update site, by name."""
    guards: dict[str, Guard] = {}
    if config.finite_update.enabled:
        guards["finite_update"] = FiniteUpdateGuard(
            config.finite_update.max_parameter_norm, config.finite_update.thorough
        )
    if config.spike.enabled:
        guards["spike"] = SpikeGuard(config.spike.factor)
    return guards
