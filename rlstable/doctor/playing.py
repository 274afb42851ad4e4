"""Checks that play an environment: fading rewards, and reach of actuators."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np

from rlstable.doctor.lints import Finding, names, short
from rlstable.guards.env import physics

_EPISODES = 16  # of random actions
_STEPS = 100
_SMALL_REACH = 0.1  # share of ctrlrange
_FADED, _MOST = 0.1, 0.75  # share of an episode's first rewards, and of the episodes


class Played(NamedTuple):
    """Steps of several episodes."""

    rewards: jax.Array  # of random actions, [T, B]
    alive: jax.Array  # whether the episode was alive before the step, [T, B]
    controls: jax.Array | None  # of actuators under random actions, the least and the greatest one, [T, B + 2, nu]


def play(env: Any) -> Played:
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


def fading_rewards(played: Played, training_length: int) -> list[Finding]:
    """Notes rewards that fade in most episodes of random actions while no episode ends, as after a robot's fall."""
    first, last = jnp.mean(played.rewards[: _STEPS // 4], axis=0), jnp.mean(played.rewards[-_STEPS // 4 :], axis=0)
    faded = jnp.mean((first > 0.0) & (last < _FADED * first))
    if not played.alive.all() or faded < _MOST or training_length <= _STEPS:
        return []
    what = f"random actions earn {short(float(jnp.mean(first)))} a step at first, less than {100 * _FADED:.0f} % "
    what += f"of that after {_STEPS * 3 // 4} steps, and no episode ends: most of training may teach nothing"
    advice = f"end the episode of a robot that has fallen, or try env.training_episode_length={_STEPS}"
    return [Finding("note", "fading rewards", (), what, advice)]


def actuator_reach(model: mujoco.MjModel, controls: jax.Array) -> list[Finding]:
    """Finds actuators of a model that the policy's actions can hardly command.

    Actions are in ±1. An environment that passes them to motors of ±40 uses 2.5 % of the motors' strength. A motor that
    no action moves may be locked on purpose, so it is no finding.
    """
    known = np.asarray(controls, np.float64).reshape(-1, model.nu)
    known = known[np.isfinite(known).all(axis=1)]
    if not len(known):
        return []
    low, high = model.actuator_ctrlrange.T
    share = np.ptp(np.clip(known, low, high), axis=0) / np.maximum(high - low, 1e-12)
    weak = [i for i in range(model.nu) if model.actuator_ctrllimited[i] and 0.0 < share[i] < _SMALL_REACH]
    if not weak:
        return []
    least = float(share[weak].min())
    what = f"actions of -1 to 1 reach {short(100.0 * least)} % of ctrlrange: the policy cannot use the actuator"
    advice = "scale the action in step: low + (action + 1) / 2 * (high - low), from actuator_ctrlrange"
    return [Finding("warning", "actuator reach", names(model, "actuator", weak), what, advice)]
