"""The batch site: is this sample fit to learn from?"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config import TransitionConfig
from rlstable.guards.base import GuardState, Verdict, all_finite, count_first, no_trips, select


class BatchContext(NamedTuple):
    """What the batch site sees.

    Attributes:
        value: The collected `Transition`, leading axes `[rows, T]`; `valid` is its mask or None.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class TransitionGuard:
    """Trips where a sample's observation, policy output or reward is not finite.

    The env guard keeps bad simulations out; what is left comes from the networks (float16 overflow, a policy gone bad).
    A bad sample is marked invalid and its reward set to zero, so that it reaches no return. An observation that is bad
    itself, or made a network overflow, is put away. The step before it is a good sample, but what it would be
    bootstrapped from is not: there the return is cut, as at a truncation.
    """

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the sample was not finite."""
        return ("observation", "policy", "value", "reward")

    def init(self) -> GuardState:
        """No trips."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: BatchContext, state: GuardState) -> Verdict:
        """Marks bad samples invalid; samples that were invalid already are not counted again."""
        data = ctx.value
        policy = (data.raw_action, data.log_prob, data.distribution)
        value = jnp.zeros_like(data.reward) if data.value is None else data.value
        fine = jnp.stack(
            [
                all_finite(data.observation, 2),
                all_finite(policy, 2),
                all_finite(value, 2),
                all_finite(data.reward, 2),
            ]
        )
        alive = jnp.ones_like(fine[0]) if data.valid is None else data.valid
        ok = jnp.all(fine, axis=0)
        # What made a network overflow once would do so in the loss again: it is put away, and nothing rests on it.
        usable = jnp.all(fine[:3], axis=0)
        goes_on = ok & jnp.concatenate([usable[:, 1:], all_finite(data.bootstrap_observation, 1)[:, None]], axis=1)
        repaired = data._replace(
            observation=select(usable, data.observation, jax.tree.map(jnp.zeros_like, data.observation)),
            valid=ok & alive,
            reward=jnp.where(ok, data.reward, 0.0),
            truncation=jnp.where(goes_on, data.truncation, 1.0),
            termination=jnp.where(goes_on, data.termination, 0.0),
        )
        return Verdict(repaired, ok, state._replace(trips=state.trips + count_first(~fine & alive)))


def batch_guards(config: TransitionConfig) -> dict[str, TransitionGuard]:
    """The guards of the batch site, by name."""
    return {"transition": TransitionGuard()} if config.enabled else {}
