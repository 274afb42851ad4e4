"""Turns sections of the configuration into the guards of each site."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.schema import ConfigError
from rlstable.guards.base import Guard
from rlstable.guards.batch import FiniteSamplesGuard
from rlstable.guards.env import Quarantine
from rlstable.guards.state import FiniteStateGuard, PolicyGuard, StateSiteGuard, StormGuard, ValueLossGuard
from rlstable.guards.update import FiniteUpdateGuard, SpikeGuard

AnyGuard = TypeVar("AnyGuard", bound=Guard)
SITES = ("env", "batch", "update", "state")
MoreGuards = Mapping[str, Mapping[str, Any]]  # by site and name


def enabled(config: GuardsConfig, **kinds: Callable[..., AnyGuard]) -> dict[str, AnyGuard]:
    """The enabled guards, each built from the other keys of the section with its name."""
    sections = {name: getattr(config, name) for name in kinds}
    return {name: kinds[name](**x.model_dump(exclude={"enabled"})) for name, x in sections.items() if x.enabled}


def check_more(more: MoreGuards, taken: Collection[str]) -> None:
    """Raises ConfigError if a site does not exist, or if one of `taken` or another guard has the same name."""
    seen = set(taken)
    for site, guards in more.items():
        if site not in SITES:
            raise ConfigError(f"more_guards: unknown site {site!r}; choose one of {', '.join(SITES)}")
        for name in guards:
            if name in seen:
                raise ConfigError(f"more_guards: another guard has the name {name!r}; choose a different name")
            seen.add(name)


def env_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the env site, by name."""
    return enabled(config, quarantine=Quarantine)


def batch_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the batch site, by name."""
    return enabled(config, finite_samples=FiniteSamplesGuard)


def update_guards(config: GuardsConfig) -> dict[str, Guard]:
    """The guards of the update site, by name."""

    def finite_update(patience: int, max_parameter_norm: float | None, thorough: bool) -> FiniteUpdateGuard:
        return FiniteUpdateGuard(max_parameter_norm, thorough)  # the host counts iterations without an update

    return enabled(config, finite_update=finite_update, spike=SpikeGuard)


def state_guards(config: GuardsConfig, ppo: PPOConfig) -> dict[str, StateSiteGuard]:
    """The guards of the state site, by name."""
    coefficient = 0.5 * ppo.vf_loss_coefficient
    value_loss = functools.partial(ValueLossGuard, discount=ppo.discounting, coefficient=coefficient)
    return enabled(config, finite_state=FiniteStateGuard, storm=StormGuard, value_loss=value_loss, policy=PolicyGuard)
