"""Turns sections of the configuration into the guards of each site."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlstable.config.guards import GuardsConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.schema import ConfigError
from rlstable.guards.base import Guard
from rlstable.guards.batch import FiniteSamplesGuard
from rlstable.guards.env import Quarantine
from rlstable.guards.state import FiniteStateGuard, PolicyGuard, StormGuard, ValueLossGuard
from rlstable.guards.update import FiniteUpdateGuard, SpikeGuard

SITES = ("env", "batch", "update", "state")
MoreGuards = Mapping[str, Mapping[str, Any]]  # by site and name


def enabled(config: GuardsConfig, **kinds: Callable[..., Guard]) -> dict[str, Guard]:
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
    """The guards of the env site by name, all that an environment needs outside of training."""
    return enabled(config, quarantine=Quarantine)


def guards_of(config: GuardsConfig, ppo: PPOConfig, more: MoreGuards) -> dict[str, dict[str, Any]]:
    """The guards of each site by name, with the guards of `more` behind the enabled ones."""

    def finite_update(patience: int, max_parameter_norm: float | None, thorough: bool) -> FiniteUpdateGuard:
        return FiniteUpdateGuard(max_parameter_norm, thorough)  # the host counts iterations without an update

    coefficient = 0.5 * ppo.vf_loss_coefficient
    value_loss = functools.partial(ValueLossGuard, discount=ppo.discounting, coefficient=coefficient)
    sites: dict[str, dict[str, Any]] = {
        "env": env_guards(config),
        "batch": enabled(config, finite_samples=FiniteSamplesGuard),
        "update": enabled(config, finite_update=finite_update, spike=SpikeGuard),
        "state": enabled(
            config, finite_state=FiniteStateGuard, storm=StormGuard, value_loss=value_loss, policy=PolicyGuard
        ),
    }
    return {site: {**guards, **more.get(site, {})} for site, guards in sites.items()}
