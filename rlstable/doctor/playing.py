"""Plays random and extreme actions in an environment, for the checks of rewards and of actuators."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.guards.env import physics

_EPISODES = 16  # of random actions; two more play only the least and only the greatest action
_STEPS = 100


class Played(NamedTuple):
    """Steps of several episodes.

    Attributes:
        rewards: Rewards of random actions, `[T, B]`.
        alive: Whether the episode was alive before the step, `[T, B]`.
        controls: Commands of the actuators of the model under all actions, `[T, B + 2, nu]`; None if unknown.
    """

    rewards: jax.Array
    alive: jax.Array
    controls: jax.Array | None


def play(env: Any) -> Played:
    """Plays at most `_STEPS` actions per episode.

    Args:
        env: One environment with Brax's interface.
    """
    return jax.jit(_play, static_argnums=0)(env, jax.random.PRNGKey(0))


def _play(env: Any, key: jax.Array) -> Played:
    key_reset, key_actions = jax.random.split(key)

    def step(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[Any, Any]:
        state, alive = carry
        action = jax.random.uniform(key, (_EPISODES, env.action_size), minval=-1.0, maxval=1.0)
        extremes = jnp.broadcast_to(jnp.array([[-1.0], [1.0]]), (2, env.action_size))
        state = jax.vmap(env.step)(state, jnp.concatenate([action, extremes]))
        controls = getattr(physics(state), "ctrl", None)
        return (state, alive & ~(state.done > 0)), (state.reward, alive, controls)

    first = jax.vmap(env.reset)(jax.random.split(key_reset, _EPISODES + 2))
    keys = jax.random.split(key_actions, _STEPS)
    _, (rewards, alive, controls) = jax.lax.scan(step, (first, jnp.ones(_EPISODES + 2, bool)), keys)
    return Played(rewards[:, :_EPISODES], alive[:, :_EPISODES], controls)
