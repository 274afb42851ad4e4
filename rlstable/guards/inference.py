"""Guard of the inference site: replaces actions that are not finite or come from a non-finite observation."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.guards.base import Guard, GuardState, Verdict, all_finite, count_first, no_trips, select


class ActionContext(NamedTuple):
    """Context of the inference site.

    Attributes:
        value: Actions `[..., A]`.
        raw: The actions before squashing, `[..., A]`, because tanh turns infinity into 1.
        observation: Observation that the policy reads, `[..., n]`, before a clip can hide infinity.
    """

    value: jax.Array
    raw: jax.Array
    observation: jax.Array


@dataclasses.dataclass(frozen=True)
class InferenceGuard(Guard):
    """Replaces a bad action by the last good action, separately for each batch element.

    `memory` is the last good action, `[..., A]`; at first, it is the safe action.

    Attributes:
        safe_action: One finite number per action element.
    """

    safe_action: tuple[float, ...]

    causes: ClassVar[tuple[str, ...]] = ("observation", "action")

    def init(self, batch_shape: tuple[int, ...] = ()) -> GuardState:
        """No trips, and the safe action for every batch element."""
        safe = jnp.asarray(self.safe_action, jnp.float32)
        return GuardState(no_trips(self.causes), jnp.broadcast_to(safe, (*batch_shape, *safe.shape)))

    def apply(self, ctx: ActionContext, state: GuardState) -> Verdict:
        batch_dims = ctx.value.ndim - 1
        fine = jnp.stack([all_finite(ctx.observation, batch_dims), all_finite((ctx.raw, ctx.value), batch_dims)])
        ok = jnp.all(fine, axis=0)
        action = select(ok, ctx.value, state.memory)
        return Verdict(action, ok, GuardState(state.trips + count_first(~fine), action))
