"""Warns if the rewards of random actions would make value targets far from 1."""

from __future__ import annotations

import jax.numpy as jnp

from rlstable.config import Config
from rlstable.doctor.finding import Finding, short
from rlstable.doctor.playing import Played
from rlstable.supervise.signs import reward_scale


def lint(config: Config, played: Played) -> list[Finding]:
    """Checks the rewards of random actions as training would.

    Args:
        config: The configuration.
        played: Episodes of the environment.
    """
    sign = reward_scale(config)
    rewards = played.rewards
    known = played.alive & jnp.isfinite(rewards)
    if not bool(known.any()):
        return []
    row = {
        "training/reward_mean": float(jnp.mean(rewards, where=known)),
        "training/reward_greatest": float(jnp.max(jnp.abs(rewards), where=known, initial=0.0)),
    }
    size = sign.value(row)
    if size is None or not sign.is_hit(size, row):
        return []
    what = f"random actions earn {short(row['training/reward_mean'])} a step: value targets of about {short(size)}"
    return [Finding("warning", "rewards", (), f"{what}, far from 1", sign.remedy(size, row), {"value_target": size})]
