"""The inference site: no action leaves the policy that is not finite, or made from an observation that is not."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.guards.base import GuardState, Verdict, all_finite, count_first, no_trips, select


class ActionContext(NamedTuple):
    """Context of the inference site.

    Attributes:
        value: Actions `[..., A]`.
        raw: The same before they are squashed, `[..., A]`; of infinity a tanh makes 1.
        observation: What the policy network reads, `[..., n]`; of infinity a clip makes its limit.
    """

    value: jax.Array
    raw: jax.Array
    observation: jax.Array


@dataclasses.dataclass(frozen=True)
class InferenceGuard:
    """Replaces an action that is not finite by the last good one, each batch element for itself.

    `memory` is the last good action, `[..., A]`, and the safe action before there was one.

    Attributes:
        safe_action: One finite number per action element.
    """

    safe_action: tuple[float, ...]

    @property
    def causes(self) -> tuple[str, ...]:
        """The part that was not finite: the observation, or only the action."""
        return ("observation", "action")

    def init(self, batch_shape: tuple[int, ...] = ()) -> GuardState:
        """No trips, and the safe action for every batch element."""
        safe = jnp.asarray(self.safe_action, jnp.float32)
        return GuardState(no_trips(self.causes), jnp.broadcast_to(safe, (*batch_shape, *safe.shape)))

    def apply(self, ctx: ActionContext, state: GuardState) -> Verdict:
        """Judges actions."""
        batch_dims = ctx.value.ndim - 1
        fine = jnp.stack([all_finite(ctx.observation, batch_dims), all_finite((ctx.raw, ctx.value), batch_dims)])
        ok = jnp.all(fine, axis=0)
        action = select(ok, ctx.value, state.memory)
        return Verdict(action, ok, GuardState(state.trips + count_first(~fine), action))
