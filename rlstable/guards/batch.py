"""The batch site: is this sample fit to learn from?"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.config.guards import GuardsConfig
from rlstable.device import sharding
from rlstable.guards import outlier
from rlstable.guards.base import Guard, GuardState, Verdict, count_first, no_trips, norm_within, select


class BatchContext(NamedTuple):
    """Context of the batch site.

    Attributes:
        value: The collected `Transition`, leading axes `[rows, T]`; `valid` is its mask or None.
    """

    value: Any


@dataclasses.dataclass(frozen=True)
class FiniteSamplesGuard:
    """Trips where a sample's observation, policy output, value estimate or reward is not finite, or absurdly large.

    The env guard keeps bad simulations out; what is left comes from the networks (float16 overflow, a policy gone bad).
    A bad sample is marked invalid and its reward set to zero, so that it reaches no return. An observation that is bad
    itself, or made a network overflow, is put away. The step before it is a good sample, but what it would be
    bootstrapped from is not: there the return is cut, as at a truncation.

    Attributes:
        max_norm: Largest norm of any of them; None for any finite one.
    """

    max_norm: float | None

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the sample was bad."""
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
                norm_within(data.observation, self.max_norm, 2),
                norm_within(policy, self.max_norm, 2) & jnp.all(data.distribution.scale > 0, axis=-1),
                norm_within(value, self.max_norm, 2),
                norm_within(data.reward, self.max_norm, 2),
            ]
        )
        alive = jnp.ones_like(fine[0]) if data.valid is None else data.valid
        ok = jnp.all(fine, axis=0)
        # What made a network overflow once would do so in the loss again: it is put away, and nothing rests on it.
        usable = jnp.all(fine[:3], axis=0)
        follows = norm_within(data.bootstrap_observation, self.max_norm, 1)
        goes_on = ok & jnp.concatenate([usable[:, 1:], follows[:, None]], axis=1)
        repaired = data._replace(
            observation=select(usable, data.observation, jax.tree.map(jnp.zeros_like, data.observation)),
            valid=ok & alive,
            reward=jnp.where(ok, data.reward, 0.0),
            truncation=jnp.where(goes_on, data.truncation, 1.0),
            termination=jnp.where(goes_on, data.termination, 0.0),
        )
        return Verdict(repaired, ok, state._replace(trips=state.trips + count_first(~fine & alive)))


@dataclasses.dataclass(frozen=True)
class RewardOutlierGuard:
    """Trips where a reward is far beyond what this task pays: `factor` times the greatest accepted so far.

    One -65,882 among unit rewards is wrong; the 100 after a long row of zeros is the task. The first batch that pays
    is judged by itself, against the geometric mean of what it pays without its greatest reward. Rewards below
    `factor * outlier.LEAST` are never judged. Every iteration that trips widens the bound by 5 %, so that a reward
    which keeps coming is learnt from in the end. A sample that trips is left out and worth 0; the episode continues.

    Attributes:
        factor: How many times the greatest accepted reward is an outlier.
    """

    factor: float

    @property
    def causes(self) -> tuple[str, ...]:
        """The only one."""
        return ("outlier",)

    def init(self) -> GuardState:
        """No trips, no reward seen."""
        return GuardState(no_trips(self.causes), outlier.nothing_yet())

    def apply(self, ctx: BatchContext, state: GuardState) -> Verdict:
        """Marks outliers invalid. What is usual is the same on all devices."""
        data, usual = ctx.value, state.memory
        alive = jnp.ones_like(data.reward, bool) if data.valid is None else data.valid
        known = jnp.where(usual.level > 0, usual.level, _typical(data.reward, alive))
        ok = outlier.within(data.reward, usual._replace(level=known), self.factor)
        bad = ~ok & alive
        greatest = jnp.max(jnp.where(ok & alive, jnp.abs(data.reward), 0.0))
        greatest, tripped = sharding.greatest((greatest, jnp.any(bad).astype(jnp.int32)))
        memory = outlier.follow(usual, jnp.maximum(usual.level, greatest), tripped > 0)
        repaired = data._replace(valid=ok & alive, reward=jnp.where(ok, data.reward, 0.0))
        return Verdict(repaired, ok | ~alive, GuardState(state.trips + count_first(bad[None]), memory))


def _typical(reward: jax.Array, alive: jax.Array) -> jax.Array:
    """The geometric mean of what the samples of all devices are paid, 0 where that is nothing.

    Without the greatest magnitude, which might be the outlier, unless it is the only one.
    """
    paid = alive & jnp.isfinite(reward) & (reward != 0)
    logarithms = jnp.log(jnp.where(paid, jnp.abs(reward), 1.0))
    total, count = sharding.total((jnp.sum(logarithms), jnp.sum(paid, dtype=jnp.int32)))
    greatest = sharding.greatest(jnp.max(jnp.where(paid, logarithms, -jnp.inf)))
    rest = jnp.where(count > 1, (total - greatest) / jnp.maximum(count - 1, 1), greatest)
    return jnp.exp(rest)


def batch_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the batch site, by name; rewards are judged once their samples are known to be finite."""
    guards: dict[str, Guard] = {}
    if config.finite_samples.enabled:
        guards["finite_samples"] = FiniteSamplesGuard(config.finite_samples.max_norm)
    if config.reward_outlier.enabled:
        guards["reward_outlier"] = RewardOutlierGuard(config.reward_outlier.factor)
    return guards
