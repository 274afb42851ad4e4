"""Plays one episode in every environment, for evaluation and for films."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import EnvState, PyTree
from rlstable.envs.vector import VectorEnv

Policy = Callable[[Any, jax.Array], jax.Array]


class Episodes(NamedTuple):
    """One episode per environment.

    Attributes:
        metrics: Sums over the episode by name, including `reward`, `[B]` each.
        length: Number of steps, `[B]`.
        aborted: 1.0 where the simulation went bad before the episode ended, `[B]`.
    """

    metrics: dict[str, jax.Array]
    length: jax.Array
    aborted: jax.Array


def run_episodes(env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array) -> Episodes:
    """Plays one episode in every environment, to its end or until the environment goes bad.

    Args:
        env: Vectorised environments; without guards no episode is aborted.
        policy: Function from observations `[B, ...]` and a random key to actions `[B, A]`.
        keys: One random key per environment, for the resets.
        key: Random key of the policy.
    """
    return watch_episodes(env, policy, keys, key, lambda state: None)[0]


def watch_episodes(
    env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array, watch: Callable[[EnvState], PyTree]
) -> tuple[Episodes, PyTree]:
    """Plays episodes like `run_episodes`, and records data of every state.

    Args:
        env: As for `run_episodes`.
        policy: As for `run_episodes`.
        keys: As for `run_episodes`.
        key: As for `run_episodes`.
        watch: Function from a batched state to the data to record.

    Returns:
        The episodes, and the recorded data of the first state and of the state after every action,
        `[1 + actions, B, ...]`. Data after the end of an episode have no meaning.
    """
    state = env.reset(keys)
    guard_state = {name: guard.init() for name, guard in env.guards.items()}
    zeros = jnp.zeros(keys.shape[:1])
    aborted = (~env.clean(state)).astype(jnp.float32)
    sums = {name: zeros for name in ("reward", *state.metrics)}

    def play(carry: Any, _: None) -> tuple[Any, Any]:
        state, active, episodes, key = carry
        key, next_key = jax.random.split(key)
        stepped, ok, _states, _slot = env.repeat_action(state, policy(state.obs, key), guard_state)
        running = active if ok is None else active & ok
        added = {**stepped.metrics, "reward": stepped.reward}
        steps = stepped.info["steps"] + env.action_repeat
        stepped = stepped.replace(info={**stepped.info, "steps": steps})
        episodes = Episodes(
            {name: total + jnp.where(running, added[name], 0.0) for name, total in episodes.metrics.items()},
            jnp.where(running, steps, episodes.length),
            episodes.aborted + (active & ~running),
        )
        running &= ~(stepped.done > 0)
        recorded = watch(stepped)
        return (stepped.replace(done=jnp.zeros_like(stepped.done)), running, episodes, next_key), recorded

    carry, first = (state, aborted == 0, Episodes(sums, zeros, aborted), key), watch(state)
    (_, _, episodes, _), recorded = jax.lax.scan(play, carry, None, length=env.episode_length // env.action_repeat)
    return episodes, jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first, recorded)
