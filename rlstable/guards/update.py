"""Guards of the update site: check each SGD step before it replaces the parameters."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree
from rlstable.guards import outlier
from rlstable.guards.base import Guard, GuardState, Verdict, all_finite, count_first, no_trips, norm_within


class UpdateContext(NamedTuple):
    """Context of the update site.

    Attributes:
        value: The candidate, `(params, opt_state)`.
        gradient_norm: Global norm of the gradient, averaged over devices, before clipping.
        update_norm: Global norm of the step from the old parameters to the candidate.
        parameter_norm: Global norm of the old parameters.
    """

    value: tuple[PyTree, PyTree]
    gradient_norm: jax.Array
    update_norm: jax.Array
    parameter_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class FiniteUpdateGuard(Guard):
    """Trips when the gradient, the candidate parameters or the candidate optimizer state are bad.

    The guard reads three norms that SGD computes anyway. It checks the gradient before clipping, because clipping turns
    inf into NaN. The squared norm overflows at 1.8e19, so a finite gradient of 1e20, which would freeze Adam's second
    moment for good, is rejected too. The state guard checks that the old numbers are finite. Then a finite
    gradient bounds every new moment, and a finite step bounds every new parameter. With `thorough`, a second pass also
    checks every number of the candidate.

    Attributes:
        max_parameter_norm: Largest norm of the parameters; None for any finite norm.
        thorough: Whether to check every number of the candidate.
    """

    max_parameter_norm: float | None
    thorough: bool

    causes: ClassVar[tuple[str, ...]] = ("gradient", "parameters", "optimizer")

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        params, opt_state = ctx.value
        bound = ctx.parameter_norm + ctx.update_norm  # of the new norm, by the triangle inequality
        params_ok = jnp.isfinite(bound)
        if self.max_parameter_norm is not None:
            params_ok &= bound <= self.max_parameter_norm
        opt_state_ok = jnp.ones((), bool)
        if self.thorough:
            params_ok &= norm_within(params, self.max_parameter_norm)
            opt_state_ok = all_finite(opt_state)
        fine = jnp.stack([jnp.isfinite(ctx.gradient_norm), params_ok, opt_state_ok])
        return Verdict(ctx.value, jnp.all(fine), state._replace(trips=state.trips + count_first(~fine)))


@dataclasses.dataclass(frozen=True)
class SpikeGuard(Guard):
    """Trips when the gradient norm is far above the geometric running mean of norms.

    Clipping would bound the length of such a step, but one bad sample would still decide its direction. A norm that is
    not finite is left to `FiniteUpdateGuard`.

    Attributes:
        factor: Multiple of the usual norm at which a norm is a spike.
    """

    factor: float

    causes: ClassVar[tuple[str, ...]] = ("spike",)

    def init(self) -> GuardState:
        return GuardState(no_trips(self.causes), jnp.zeros((), jnp.float32))

    def apply(self, ctx: UpdateContext, state: GuardState) -> Verdict:
        norm, level = ctx.gradient_norm, state.memory
        ok = outlier.within(norm, level, self.factor)
        spike = ~ok & jnp.isfinite(norm)
        trips = state.trips + count_first(spike[None])
        return Verdict(ctx.value, ok, GuardState(trips, outlier.follow(level, norm, ok)))
