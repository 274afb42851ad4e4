"""The state site: once per iteration, is what would be kept worth keeping, and is training still training?

A verdict is for the whole state: one that trips is never saved. Every guard here counts its trips in a row, and when
they reach its patience the run ends by the guard's name.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.guards.base import Guard, GuardState, Verdict, count_first, no_trips, norm_within

_LONGEST_HORIZON = 1e4  # steps that count where the discount is 1
_GREATEST_REWARD = 1e9  # so that what it could add up to is a number too


class Report(NamedTuple):
    """Numbers of an iteration, scalars over all devices.

    Attributes:
        valid_share: Share of the samples that were fit to learn from.
        updated: Whether any update was accepted; what follows exists only then.
        greatest_reward: Largest magnitude of a reward as it was learnt from.
        value_loss: Mean over the accepted updates, as in `training/v_loss`; likewise the last two.
        distance: Mean distance in nats from the policy that collected the batch to the one that collects the next.
        std: Mean standard deviation of the policy.
        entropy: Per action element.
    """

    valid_share: jax.Array
    updated: jax.Array
    greatest_reward: jax.Array
    value_loss: jax.Array
    distance: jax.Array
    std: jax.Array
    entropy: jax.Array


class StateContext(NamedTuple):
    """Context of the state site.

    Attributes:
        value: `(params, opt_state, normalizer)` at the end of the iteration, the first two as `UpdateContext` has them.
        report: Of the iteration.
    """

    value: Any
    report: Report


class Row(NamedTuple):
    """The memory of a state guard.

    Attributes:
        length: int32, trips in a row.
        scale: float32, what else it remembers.
    """

    length: jax.Array
    scale: jax.Array


class StateSiteGuard(Guard, Protocol):
    """A guard whose patience ends."""

    def exhausted(self, state: GuardState) -> jax.Array:
        """Whether it has tripped so many times in a row that the run has to end."""


@dataclasses.dataclass(frozen=True)
class _Patient(abc.ABC):
    """Base of this site's guards: they repair nothing, and their patience ends.

    Attributes:
        patience: Trips in a row that are too many.
    """

    patience: int

    @property
    @abc.abstractmethod
    def causes(self) -> tuple[str, ...]:
        """Why it can trip."""

    def init(self) -> GuardState:
        """No trips, none in a row."""
        return GuardState(no_trips(self.causes), Row(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32)))

    def exhausted(self, state: GuardState) -> jax.Array:
        """Whether patience has ended."""
        return state.memory.length >= self.patience

    def _verdict(
        self, ctx: StateContext, fine: jax.Array, state: GuardState, scale: jax.Array | None = None
    ) -> Verdict:
        """Counts what is not fine, `[causes]`."""
        ok = jnp.all(fine)
        length = jnp.where(ok, 0, state.memory.length + 1)
        memory = Row(length, state.memory.scale if scale is None else scale)
        return Verdict(ctx.value, ok, GuardState(state.trips + count_first(~fine), memory))


@dataclasses.dataclass(frozen=True)
class FiniteStateGuard(_Patient):
    """Trips when parameters, optimizer state or observation statistics are not finite, or absurdly large.

    Attributes:
        max_parameter_norm: Largest norm of the parameters; None for any finite one.
        max_other_norm: Largest norm of the optimizer's state, and of the statistics.
    """

    max_parameter_norm: float | None
    max_other_norm: float | None

    @property
    def causes(self) -> tuple[str, ...]:
        """Which part of the training state was bad."""
        return ("parameters", "optimizer", "normalizer")

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        """Judges the training state."""
        limits = (self.max_parameter_norm, self.max_other_norm, self.max_other_norm)
        fine = [norm_within(part, limit) for part, limit in zip(ctx.value, limits, strict=True)]
        return self._verdict(ctx, jnp.stack(fine), state)


@dataclasses.dataclass(frozen=True)
class StormGuard(_Patient):
    """Trips when too large a share of an iteration's samples had to be left out: no longer one bad simulation.

    Attributes:
        max_share: Share of invalid samples that is still taken for chance.
    """

    max_share: float

    @property
    def causes(self) -> tuple[str, ...]:
        """The only one."""
        return ("environments",)

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        """Judges the share of valid samples."""
        return self._verdict(ctx, (ctx.report.valid_share >= 1.0 - self.max_share)[None], state)


@dataclasses.dataclass(frozen=True)
class ValueLossGuard(_Patient):
    """Trips when the value function is further off than any return this task could pay.

    A return is at most the greatest reward times the horizon, 1 / (1 - discount), so that sparse rewards, which make
    a value loss jump from nothing, are no trip.

    Attributes:
        factor: On the square of that return.
        discount: Per step.
        coefficient: What the value loss is multiplied by, `0.5 * ppo.vf_loss_coefficient`.
    """

    factor: float
    discount: float
    coefficient: float

    @property
    def causes(self) -> tuple[str, ...]:
        """The only one."""
        return ("exploded",)

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        """Judges the value loss; `memory.scale` is the greatest reward so far."""
        report = ctx.report
        horizon = min(1.0 / max(1.0 - self.discount, 1e-12), _LONGEST_HORIZON)
        scale = jnp.maximum(state.memory.scale, report.greatest_reward)
        limit = self.factor * self.coefficient * jnp.square(1.0 + horizon * jnp.minimum(scale, _GREATEST_REWARD))
        fine = (jnp.isfinite(report.value_loss) & (report.value_loss <= limit)) | ~report.updated
        scale = jnp.where(jnp.isfinite(scale), scale, state.memory.scale)
        return self._verdict(ctx, fine[None], state, scale)


@dataclasses.dataclass(frozen=True)
class PolicyGuard(_Patient):
    """Trips when the policy has jumped away, or its standard deviation or entropy has collapsed or exploded.

    Attributes:
        max_kl: Largest mean distance in nats (`rlstable.ppo.distance`); None for any.
        min_std: Least mean standard deviation before squashing.
        max_std: Greatest one.
        min_entropy: Least entropy per action element, in nats.
    """

    max_kl: float | None
    min_std: float | None
    max_std: float | None
    min_entropy: float | None

    @property
    def causes(self) -> tuple[str, ...]:
        """Causes: what happened to the policy."""
        return ("kl", "std_collapsed", "std_exploded", "entropy_collapsed")

    def apply(self, ctx: StateContext, state: GuardState) -> Verdict:
        """Judges the means over the iteration's accepted updates."""
        report = ctx.report
        yes = jnp.ones((), bool)
        within = (
            jnp.isfinite(report.distance) & (yes if self.max_kl is None else report.distance <= self.max_kl),
            yes if self.min_std is None else ~(report.std < self.min_std),  # one that is NaN has exploded
            jnp.isfinite(report.std) & (yes if self.max_std is None else report.std <= self.max_std),
            jnp.isfinite(report.entropy) & (yes if self.min_entropy is None else report.entropy >= self.min_entropy),
        )
        fine = [held | ~report.updated for held in within]
        return self._verdict(ctx, jnp.stack(fine), state)


def state_guards(config: GuardsConfig, ppo: PPOConfig) -> dict[str, StateSiteGuard]:
    """The guards of the state site, by name."""
    guards: dict[str, StateSiteGuard] = {}
    if config.finite_state.enabled:
        guards["finite_state"] = FiniteStateGuard(
            config.finite_state.patience, config.finite_state.max_parameter_norm, config.finite_state.max_other_norm
        )
    if config.storm.enabled:
        guards["storm"] = StormGuard(**config.storm.model_dump(exclude={"enabled"}))
    if config.value_loss.enabled:
        own = config.value_loss
        guards["value_loss"] = ValueLossGuard(own.patience, own.factor, ppo.discounting, 0.5 * ppo.vf_loss_coefficient)
    if config.policy.enabled:
        guards["policy"] = PolicyGuard(**config.policy.model_dump(exclude={"enabled"}))
    return guards
