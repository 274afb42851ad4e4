"""Plays two episodes in a row in each environment, and warns if the second one ends at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import Config
from rlstable.doctor.finding import Finding, short
from rlstable.envs.vector import VectorEnv

_ENVIRONMENTS = 16
_STEPS = 1000  # longest episode that is waited for
_SHARE = 0.1  # of the first episode's length


def lint(config: Config, env: Any) -> list[Finding]:
    """Compares first and second episodes of random actions, reset as in training.

    Args:
        config: The configuration.
        env: One environment with Brax's interface.
    """
    length = min(config.env.episode_length, _STEPS * config.env.action_repeat)
    envs = VectorEnv(env, length, config.env.action_repeat, {})
    if not jax.eval_shape(env.reset, jax.random.PRNGKey(0)).info:
        return []
    lengths = jax.jit(lambda key: _lengths(envs, env.action_size, key))(jax.random.PRNGKey(0))
    first, second = map(float, lengths)
    if not second <= max(_SHARE * first, config.env.action_repeat) < first:
        return []
    means = f"{short(first)}, second ones of {short(second)}"
    what = f"first episodes have a mean length of {means}: a reset does not restore info"
    numbers = {"first": first, "second": second}
    return [Finding("warning", "episodes", (), what, "set env.restore_info=true if step counts in info", numbers)]


def _lengths(envs: VectorEnv, action_size: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean lengths of first and second episodes, over environments that ended both; NaN without any."""
    key_reset, key_actions = jax.random.split(key)

    def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[Any, None]:
        state, lengths = carry
        action = jax.random.uniform(key, (_ENVIRONMENTS, action_size), minval=-1.0, maxval=1.0)
        state = envs.step(state, action, None, key, {}).state
        ended = (state.done > 0)[:, None]
        first_free = jnp.cumsum(lengths == 0, axis=1) == 1
        return (state, jnp.where(ended & first_free & (lengths == 0), state.info["steps"][:, None], lengths)), None

    carry = (envs.reset(jax.random.split(key_reset, _ENVIRONMENTS)), jnp.zeros((_ENVIRONMENTS, 2)))
    keys = jax.random.split(key_actions, 2 * envs.episode_length // envs.action_repeat)
    (_, lengths), _ = jax.lax.scan(step, carry, keys)
    first, second = jnp.mean(lengths, axis=0, where=jnp.all(lengths > 0, axis=1, keepdims=True))
    return first, second
