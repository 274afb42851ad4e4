"""Guards for any optax training loop: an optimizer that rejects a bad update as a whole.

Unlike `optax.apply_if_finite`, it never accepts the n-th bad update in a row, and it rejects finite numbers that are as
deadly as NaN: a gradient of 1e20 freezes Adam's second moment for good.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlstable.guards.base import Guard, GuardState, fold, norm_of, select
from rlstable.guards.update import FiniteUpdateGuard, SpikeGuard, UpdateContext


class GuardedState(NamedTuple):
    """State of a `guarded` optimizer.

    Attributes:
        inner: State of the optimizer inside; a rejected update leaves it as it is.
        guards: State of each guard by name, with its trips by cause, int32.
        streak: int32, rejected updates in a row.
        total: int32, all rejected updates.
    """

    inner: optax.OptState
    guards: dict[str, GuardState]
    streak: jax.Array
    total: jax.Array


def guarded(
    optimizer: optax.GradientTransformation,
    *,
    spike_factor: float | None = 1000.0,
    max_parameter_norm: float | None = 1e6,
    thorough: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose bad updates become zero, and leave its state as it is.

    An update is bad if the gradient or the step is not finite, if the gradient's norm is above 1.8e19, whose square is
    infinite in float32, if the parameters could become too large, or if it is a spike. The gradients of several devices
    must be averaged before, so that all devices decide alike. Give the optimizer the parameters:
    `update(gradients, state, params)`.

    Args:
        optimizer: Any optax transformation, clipping included: its gradients are checked before it clips them.
        spike_factor: Multiple of the usual gradient norm, a running mean of logarithms, at which an update is a spike;
            None for no such check.
        max_parameter_norm: Largest norm of the parameters; None for any finite norm.
        thorough: Whether to look at every new number of the parameters and of the optimizer's state, too, for
            optimizers that square or divide more than Adam does.
    """
    inner = optax.with_extra_args_support(optimizer)
    guards: dict[str, Guard] = {"finite_update": FiniteUpdateGuard(max_parameter_norm, thorough)}
    if spike_factor is not None:
        guards["spike"] = SpikeGuard(spike_factor)

    def init(params: optax.Params) -> GuardedState:
        zero = jnp.zeros((), jnp.int32)
        return GuardedState(inner.init(params), {name: guard.init() for name, guard in guards.items()}, zero, zero)

    def update(
        gradients: optax.Updates, state: GuardedState, params: optax.Params | None = None, **more: Any
    ) -> tuple[optax.Updates, GuardedState]:
        if params is None:
            raise ValueError("guarded: needs the parameters: optimizer.update(gradients, state, params)")
        updates, new = inner.update(gradients, state.inner, params, **more)
        candidate = optax.apply_updates(params, updates), new
        ctx = UpdateContext(candidate, norm_of(gradients), norm_of(updates), norm_of(params))
        verdict = fold(guards, ctx, state.guards)
        ok = jnp.asarray(verdict.ok)
        kept = select(ok, new, state.inner), verdict.state
        rejected = 1 - ok.astype(jnp.int32)
        counts = jnp.where(ok, 0, state.streak + 1), state.total + rejected
        return select(ok, updates, jax.tree.map(jnp.zeros_like, updates)), GuardedState(*kept, *counts)

    return optax.GradientTransformationExtraArgs(init, update)


def exhausted(state: GuardedState, patience: int) -> bool:
    """Whether the last `patience` updates were all rejected, on the host; for several seeds, of any of them."""
    return bool((jax.device_get(state.streak) >= patience).any())


def trips(state: GuardedState) -> dict[str, int]:
    """Rejected updates by `guard/cause`, on the host; of several seeds or devices, their sum."""
    kinds: dict[str, type[Guard]] = {"finite_update": FiniteUpdateGuard, "spike": SpikeGuard}
    counts = jax.device_get({name: own.trips for name, own in state.guards.items()})
    return {
        f"{name}/{cause}": int(own[..., number].sum())
        for name, own in counts.items()
        for number, cause in enumerate(kinds[name].causes)
    }
