"""Plays one episode in every environment, for evaluation and for films."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import EnvState, PyTree
from rlstable.envs.vector import VectorEnv

Policy = Callable[[Any, jax.Array], jax.Array]

_MOST_ACTIONS = 100  # actions between two checks whether an episode still runs; each check costs a GPU a transfer


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

    The program ends soon after the last episode: bad policies, which fall at once, are evaluated quickly.

    Args:
        env: Vectorised environments; without guards no episode is aborted.
        policy: Function from observations `[B, ...]` and a random key to actions `[B, A]`.
        keys: One random key per environment, for the resets.
        key: Random key of the policy.
    """
    carry, play = _episodes(env, policy, keys, key, lambda state: None)
    actions = env.episode_length // env.action_repeat
    part = next(size for size in range(min(_MOST_ACTIONS, actions), 0, -1) if actions % size == 0)

    def play_part(value: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        return value[0] + part, jax.lax.scan(play, value[1], None, length=part)[0]

    def runs(value: tuple[jax.Array, Any]) -> jax.Array:
        return (value[0] < actions) & jnp.any(value[1][1])

    _, (_, _, episodes, _) = jax.lax.while_loop(runs, play_part, (jnp.zeros((), jnp.int32), carry))
    return episodes


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
    carry, play = _episodes(env, policy, keys, key, watch)
    first = watch(carry[0])
    (_, _, episodes, _), recorded = jax.lax.scan(play, carry, None, length=env.episode_length // env.action_repeat)
    return episodes, jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first, recorded)


def _episodes(
    env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array, watch: Callable[[EnvState], PyTree]
) -> tuple[Any, Callable[[Any, None], tuple[Any, PyTree]]]:
    """The first carry of a scan over actions (state, running, episodes, key), and its body."""
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

    return (state, aborted == 0, Episodes(sums, zeros, aborted), key), play
