"""Guards of the batch site: check the collected samples before SGD."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree
from rlstable.guards import masked
from rlstable.guards.base import Guard, GuardState, Verdict, count_first, norm_within, select


class BatchContext(NamedTuple):
    """Context of the batch site: `value` is a `Collected`, with leading axes `[rows, T]`."""

    value: PyTree


@dataclasses.dataclass(frozen=True)
class FiniteSamplesGuard(Guard):
    """Trips where a sample's observation, policy output, value estimate or reward is not finite, or far too large.

    The env guard already replaces bad environments. The bad numbers that remain come from the networks, for example
    from a float16 overflow. A bad sample is marked invalid and its reward becomes 0, so that no return contains it. An
    observation that is bad, or that made a network overflow, becomes 0. The previous step is a good sample, but it
    cannot bootstrap from a bad one: the return is cut there, as at a truncation.

    Attributes:
        max_norm: Largest norm of each part of a sample; None for any finite norm.
    """

    max_norm: float | None

    causes: ClassVar[tuple[str, ...]] = ("observation", "policy", "value", "reward")

    def apply(self, ctx: BatchContext, state: GuardState) -> Verdict:
        """Marks bad samples invalid. Samples that were already invalid are not counted again."""
        data = ctx.value
        policy = (data.raw_action, data.log_prob, data.distribution)
        value = jnp.zeros_like(data.reward) if data.value is None else data.value
        fine = jnp.stack(
            [
                norm_within(data.observation, self.max_norm, 2),
                norm_within(policy, self.max_norm, 2) & jnp.all(data.distribution.scale > 0, axis=-1),
                norm_within(value, self.max_norm, 2),
                norm_within(data.reward, self.max_norm, 2),
            ]
        )
        alive = masked.filled(data.valid, data.reward)
        ok = jnp.all(fine, axis=0)
        # An observation that made a network overflow would do so again in the loss, so it becomes 0.
        usable = jnp.all(fine[:3], axis=0)
        last_usable = norm_within(data.bootstrap_observation, self.max_norm, 2)
        bootstraps = ok & jnp.concatenate([usable[:, 1:], last_usable], axis=1)
        repaired = data._replace(
            observation=select(usable, data.observation, jax.tree.map(jnp.zeros_like, data.observation)),
            valid=ok & alive,
            reward=jnp.where(ok, data.reward, 0.0),
            truncation=jnp.where(bootstraps, data.truncation, 1.0),
            termination=jnp.where(bootstraps, data.termination, 0.0),
        )
        return Verdict(repaired, ok, state._replace(trips=state.trips + count_first(~fine & alive)))
