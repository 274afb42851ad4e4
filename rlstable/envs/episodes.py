"""Plays one episode in every environment, for evaluation and for films."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstable.device.trees import EnvState, Observation, PyTree
from rlstable.envs.vector import VectorEnv
from rlstable.guards.base import both

Policy = Callable[[Observation, jax.Array], jax.Array]  # from observations [B, ...] and a random key to actions [B, A]

_MOST_ACTIONS = 100  # actions between two checks whether an episode still runs; each check costs a GPU a transfer


class Episodes(NamedTuple):
    """One episode per environment."""

    metrics: dict[str, jax.Array]  # sums over the episode by name, including `reward`, [B] each
    length: jax.Array  # number of steps, [B]
    aborted: jax.Array  # 1.0 where the simulation went bad before the episode ended, [B]


Carry = tuple[EnvState, jax.Array, Episodes, jax.Array]  # state, running environments, episodes so far, random key


def run_episodes(env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array) -> Episodes:
    """Plays one episode in every environment, to its end or until the environment goes bad.

    The program ends soon after the last episode: bad policies, which fall at once, are evaluated quickly. Without
    guards no episode is aborted. `keys` are one per environment, for the resets; `key` is the policy's.
    """
    play = _player(env, policy, lambda state: None)
    actions = env.episode_length // env.action_repeat
    size = next(size for size in range(min(_MOST_ACTIONS, actions), 0, -1) if actions % size == 0)

    def play_few(before: tuple[jax.Array, jax.Array, Carry]) -> tuple[jax.Array, jax.Array, Carry]:
        carry = jax.lax.scan(play, before[2], None, length=size)[0]
        played = before[0] + size
        return played, (played < actions) & jnp.any(carry[1]), carry

    carry = _first_carry(env, keys, key)
    before = jnp.zeros((), jnp.int32), jnp.any(carry[1]), carry
    _, _, episodes, _ = jax.lax.while_loop(lambda part: part[1], play_few, before)[2]
    return episodes


def watch_episodes(
    env: VectorEnv, policy: Policy, keys: jax.Array, key: jax.Array, watch: Callable[[EnvState], PyTree]
) -> tuple[Episodes, PyTree]:
    """Plays episodes like `run_episodes`, and records what `watch` returns of every batched state.

    The records are of the first state and of the state after every action, `[1 + actions, B, ...]`. Those after the end
    of an episode have no meaning.
    """
    carry, play = _first_carry(env, keys, key), _player(env, policy, watch)
    first = watch(carry[0])
    (_, _, episodes, _), recorded = jax.lax.scan(play, carry, None, length=env.episode_length // env.action_repeat)
    return episodes, jax.tree.map(lambda one, others: jnp.concatenate([one[None], others]), first, recorded)


def _first_carry(env: VectorEnv, keys: jax.Array, key: jax.Array) -> Carry:
    state = env.reset(keys)
    zeros = jnp.zeros(keys.shape[:1])
    aborted = (~env.clean(state)).astype(jnp.float32)
    sums = {name: zeros for name in ("reward", *state.metrics)}
    return state, aborted == 0, Episodes(sums, zeros, aborted), key


def _player(
    env: VectorEnv, policy: Policy, watch: Callable[[EnvState], PyTree]
) -> Callable[[Carry, None], tuple[Carry, PyTree]]:
    """The body of a scan over actions."""
    guard_state = {name: guard.init() for name, guard in env.guards.items()}

    def play(carry: Carry, _: None) -> tuple[Carry, PyTree]:
        state, active, episodes, key = carry
        key, next_key = jax.random.split(key)
        stepped, ok, _states, _slot = env.repeat_action(state, policy(state.obs, key), guard_state)
        running = both(ok, active)
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

    return play
