"""Guards of the state site: check the whole training state once per iteration.

A state that trips a guard is never saved. Each guard counts its trips in a row. When the count reaches the guard's
patience, the supervisor recovers the run, or the run ends with the guard's name as stop reason.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree
from rlstable.guards.base import Guard, GuardState, Verdict, all_within, count_first, no_trips, norm_within

_GREATEST_STATISTIC = 3e12  # root of the largest variance; observations may have the size of 1e12
_LONGEST_HORIZON = 1e4  # steps, for a discount of 1
_ENTROPY_OF_UNIT_STD = 1.418939  # nats, of a Gaussian before squashing
_GREATEST_REWARD = 1e9  # larger rewards would overflow the squared return


class IterationStats(NamedTuple):
    """Statistics of an iteration, scalars over all devices.

    Attributes:
        iterations: Iterations before this one.
        valid_share: Share of valid samples.
        updated: Whether any update was accepted; value loss, distance, std and entropy are defined only then.
        greatest_reward: Largest magnitude of a reward after scaling and clipping.
        value_loss: Mean over the accepted updates, as in `training/v_loss`.
        distance: Mean distance in nats between the policies that collect this batch and the next batch.
        std: Mean standard deviation of the policy over the accepted updates.
        entropy: Mean entropy per action element over the accepted updates.
    """

    iterations: jax.Array
    valid_share: jax.Array
    updated: jax.Array
    greatest_reward: jax.Array
    value_loss: jax.Array
    distance: jax.Array
    std: jax.Array
    entropy: jax.Array


class StateContext(NamedTuple):
    """Context of the state site: `value` is `(params, opt_state, statistics)` at the end of the iteration."""

    value: tuple[PyTree, PyTree, PyTree]
    report: IterationStats


class StreakMemory(NamedTuple):
    """Memory of a state guard.

    Attributes:
        length: int32, trips in a row.
        own: What a guard keeps besides.
    """

    length: jax.Array
    own: PyTree = ()


@dataclasses.dataclass(frozen=True)
class StateSiteGuard(Guard):
    """Base of this site's guards, which repair nothing.

    Attributes:
        patience: Number of trips in a row at which the guard is exhausted.
    """

    patience: int

    def init(self) -> GuardState:
        return GuardState(no_trips(self.causes), StreakMemory(jnp.zeros((), jnp.int32)))

    def exhausted(self, state: GuardState) -> jax.Array:
        """Whether the run must stop or recover."""
        return state.memory.length >= self.patience

    def _verdict(self, ctx: StateContext, fine: jax.Array, state: GuardState, own: PyTree = ()) -> Verdict:
        """The verdict for `fine`, bool `[causes]`, with updated counts and what the guard keeps besides."""
        ok = jnp.all(fine)
        memory = StreakMemory(jnp.where(ok, 0, state.memory.length + 1), own)
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(~fine), memory))


@dataclasses.dataclass(frozen=True)
class FiniteStateGuard(StateSiteGuard):
    """Trips when parameters, optimizer state or observation statistics are not finite, or far too large.

    Attributes:
        max_parameter_norm: Largest norm of the parameters; None for any finite norm.
        max_other_norm: Largest norm of the optimizer state; None for any finite norm, and for any finite statistics.
    """

    max_parameter_norm: float | None
    max_other_norm: float | None

    causes: ClassVar[tuple[str, ...]] = ("parameters", "optimizer", "normalizer")

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        parameters, optimizer, statistics = ctx.value
        limit = self.max_other_norm
        fine = (
            norm_within(parameters, self.max_parameter_norm),
            norm_within(optimizer, limit),
            all_within(statistics, None if limit is None else min(limit, _GREATEST_STATISTIC) ** 2),
        )
        return self._verdict(ctx, jnp.stack(fine), state)


@dataclasses.dataclass(frozen=True)
class StormGuard(StateSiteGuard):
    """Trips when too large a share of an iteration's samples is invalid.

    Attributes:
        max_share: Largest accepted share of invalid samples.
    """

    max_share: float

    causes: ClassVar[tuple[str, ...]] = ("environments",)

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        return self._verdict(ctx, (ctx.report.valid_share >= 1.0 - self.max_share)[None], state)


@dataclasses.dataclass(frozen=True)
class ValueLossGuard(StateSiteGuard):
    """Trips when the value loss is larger than any return of this task could explain.

    The largest possible return is the largest reward times the horizon, 1 / (1 - discount). So the first sparse reward,
    which makes the value loss jump from zero, does not trip the guard. In the first `patience` iterations
    only a loss that is not finite trips: a new value network may overshoot, and no rewards of whole episodes are known.

    Attributes:
        factor: Multiple of the squared largest return.
        discount: Discount per step.
        coefficient: Factor of the value loss in the total loss, `0.5 * ppo.vf_loss_coefficient`.
    """

    factor: float
    discount: float
    coefficient: float

    causes: ClassVar[tuple[str, ...]] = ("exploded",)

    def init(self) -> GuardState:
        return super().init()._replace(memory=StreakMemory(jnp.int32(0), own=jnp.float32(0.0)))

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        report = ctx.report
        horizon = min(1.0 / max(1.0 - self.discount, 1e-12), _LONGEST_HORIZON)
        greatest = jnp.maximum(state.memory.own, report.greatest_reward)
        limit = self.factor * self.coefficient * jnp.square(1.0 + horizon * jnp.minimum(greatest, _GREATEST_REWARD))
        small = (report.value_loss <= limit) | (report.iterations < self.patience)
        fine = (jnp.isfinite(report.value_loss) & small) | ~report.updated
        greatest = jnp.where(jnp.isfinite(greatest), greatest, state.memory.own)
        return self._verdict(ctx, fine[None], state, greatest)


@dataclasses.dataclass(frozen=True)
class PolicyGuard(StateSiteGuard):
    """Trips when the policy changed too much, or its standard deviation or entropy left the bounds.

    A small entropy counts as `saturated`, squashed actions at their bounds, unless the deviation allows no larger one.

    Attributes:
        max_kl: Largest mean distance in nats (`rlstable.ppo.distance`); None for no limit.
        min_std: Smallest mean standard deviation before squashing; None for no limit.
        max_std: Largest mean standard deviation before squashing; None for no limit.
        min_entropy: Smallest entropy per action element, in nats; None for no limit.
    """

    max_kl: float | None
    min_std: float | None
    max_std: float | None
    min_entropy: float | None

    causes: ClassVar[tuple[str, ...]] = ("kl", "std_collapsed", "std_exploded", "saturated")

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        report = ctx.report
        min_entropy = -jnp.inf if self.min_entropy is None else self.min_entropy
        min_std = jnp.maximum(self.min_std or 0.0, jnp.exp(min_entropy - _ENTROPY_OF_UNIT_STD))
        within = (
            jnp.isfinite(report.distance) & (report.distance <= (jnp.inf if self.max_kl is None else self.max_kl)),
            ~(report.std < min_std),  # NaN counts as std_exploded
            jnp.isfinite(report.std) & (report.std <= (jnp.inf if self.max_std is None else self.max_std)),
            jnp.isfinite(report.entropy) & (report.entropy >= min_entropy),
        )
        fine = [ok | ~report.updated for ok in within]
        return self._verdict(ctx, jnp.stack(fine), state)
