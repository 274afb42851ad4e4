"""Scale of the rewards: plays random actions and says where value targets would be far from 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.doctor.finding import Finding, short
from rlstable.supervise.signs import reward_scale

_EPISODES = 16
_STEPS = 100


def lint(config: Config, env: Any) -> list[Finding]:
    """Plays `_EPISODES` episodes of at most `_STEPS` random actions, and judges their rewards as training would.

    Args:
        config: What would be trained.
        env: One environment with Brax's interface.
    """
    sign = reward_scale(config)
    rewards, alive = jax.jit(_play, static_argnums=0)(env, jax.random.PRNGKey(0))
    known = alive & jnp.isfinite(rewards)
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


def _play(env: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rewards `[T, B]` of random actions, and whether the episode was still going on before the step."""
    key_reset, key_actions = jax.random.split(key)

    def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        state, alive = carry
        action = jax.random.uniform(key, (_EPISODES, env.action_size), minval=-1.0, maxval=1.0)
        state = jax.vmap(env.step)(state, action)
        return (state, alive & ~(state.done > 0)), (state.reward, alive)

    first = jax.vmap(env.reset)(jax.random.split(key_reset, _EPISODES))
    keys = jax.random.split(key_actions, _STEPS)
    _, played = jax.lax.scan(step, (first, jnp.ones(_EPISODES, bool)), keys)
    return played
