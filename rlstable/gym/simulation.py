"""Copies of an environment behind two compiled programs: reset, and step with an automatic reset."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.compilation.ffi import interruptible
from rlstable.config.guards import GuardsConfig
from rlstable.config.precision import PrecisionConfig
from rlstable.config.run import EnvConfig
from rlstable.device.precision import level
from rlstable.device.shared import with_shared_of, without_shared
from rlstable.device.transforms import apply_if
from rlstable.device.trees import Env, EnvState, Observation
from rlstable.envs.float64 import Float64Physics
from rlstable.envs.vector import VectorEnv
from rlstable.guards.base import select
from rlstable.guards.env import physics
from rlstable.ppo.guards import env_guards

Numbers = Any  # an array of JAX inside of the programs, of NumPy outside
Part = TypeVar("Part", bound="Seen | Outcome")


class Seen(NamedTuple):
    """Part of a step that Gymnasium returns for every environment."""

    obs: Observation  # [B, ...], of the new episode where one begins
    metrics: dict[str, Numbers]  # [B] each, of the new episode where one begins


class Outcome(NamedTuple):
    """Result of a step of every environment."""

    next: Seen
    final: Seen  # after the step and before an automatic reset
    reward: Numbers  # [B]
    terminated: Numbers  # bool [B]
    truncated: Numbers  # bool [B]
    quarantined: Numbers  # whether a guard ended the episode, bool [B]


class _Carry(NamedTuple):
    keys: jax.Array  # random key of every environment for its further episodes, [B, 2]
    state: EnvState  # [B]


class Simulation:
    """Steps copies of an environment, one per seed, with the action repeat, episode length and guards of a config.

    With `autoreset` a finished environment starts a new episode within the same step. Every environment has its own
    random keys, so that its episodes do not depend on the other environments. If a guard of the env site rejects a
    step, the episode terminates with reward 0 and the last good observation.
    """

    def __init__(
        self, settings: EnvConfig, limits: GuardsConfig, precision: PrecisionConfig, env: Env, autoreset: bool
    ):
        self._precision = level(precision)
        self._autoreset = autoreset
        physics_env = Float64Physics(env) if self._precision.x64 else env
        self._env = VectorEnv(physics_env, settings.episode_length, settings.action_repeat, env_guards(limits))
        self._begin, self._next = jax.jit(self._first), jax.jit(self._step, donate_argnums=0)
        self._carry: _Carry | None = None
        self._turn = threading.Lock()  # of several threads with one environment, one after another

    def observation(self) -> Observation:
        """Shape and type of the observation of one environment."""
        return jax.eval_shape(self._env.env.reset, jax.random.PRNGKey(0)).obs

    def reset(self, seeds: np.ndarray | None) -> Seen:
        """Starts an episode in every environment, with seeds, uint32 `[B]`, or with its next random key for None."""
        with self._turn, self._precision.compiled(), interruptible():
            if seeds is not None:
                keys = jax.vmap(jax.random.PRNGKey)(jnp.asarray(seeds, jnp.uint32))
            else:
                keys = self._running.keys
            self._carry, seen = self._begin(keys)
            return _on_host(seen)

    def step(self, action: np.ndarray) -> Outcome:
        """Takes one action `[B, A]` in every environment."""
        with self._turn, self._precision.compiled(), interruptible():
            carry, self._carry = self._running, None  # its arrays are donated
            self._carry, outcome = self._next(carry, action)
            return _on_host(outcome)

    @property
    def positions(self) -> np.ndarray:
        """Generalized positions of every environment, `[B, nq]`."""
        simulated = physics(self._running.state)
        return np.array(simulated.qpos if hasattr(simulated, "qpos") else simulated.q)

    @property
    def _running(self) -> _Carry:
        if self._carry is None:
            raise RuntimeError("step: call reset first")
        return self._carry

    def _first(self, keys: jax.Array) -> tuple[_Carry, Seen]:
        with self._precision.narrow():
            pairs = jax.vmap(jax.random.split)(keys)
            state = self._env.reset(pairs[:, 1])
            return _Carry(pairs[:, 0], state), Seen(state.obs, state.metrics)

    def _step(self, carry: _Carry, action: jax.Array) -> tuple[_Carry, Outcome]:
        with self._precision.narrow():
            env, before = self._env, carry.state
            guard_state = {name: guard.init() for name, guard in env.guards.items()}
            state, fine, _, _ = env.repeat_action(before, action, guard_state)
            ok = jnp.broadcast_to(fine, state.done.shape)
            steps = state.info["steps"] + env.action_repeat
            ended = state.done > 0
            cut = jnp.where(ended, state.info["truncation"] > 0, steps >= env.episode_length)
            terminated, truncated = ~ok | (ended & ~cut), ok & cut
            none = jax.tree.map(jnp.zeros_like, state.metrics)
            obs, metrics = select(ok, (state.obs, state.metrics), (before.obs, none))
            info = {**state.info, "steps": steps}
            state = state.replace(obs=obs, metrics=metrics, done=jnp.zeros_like(state.done), info=info)
            stepped = _Carry(carry.keys, state)
            following = self._restarted(stepped, terminated | truncated) if self._autoreset else stepped
            outcome = Outcome(
                Seen(following.state.obs, following.state.metrics), Seen(obs, metrics),
                jnp.where(ok, state.reward, 0.0), terminated, truncated, ~ok,
            )  # fmt: skip
            return following, outcome

    def _restarted(self, carry: _Carry, finished: jax.Array) -> _Carry:
        """The carry with a new episode where one has finished; computed only if any has."""

        def restart(carry: _Carry) -> _Carry:
            fresh = self._first(carry.keys)[0]
            state = select(~finished, without_shared(carry.state), without_shared(fresh.state))
            keys = select(~finished, carry.keys, fresh.keys)
            return _Carry(keys, with_shared_of(state, carry.state))

        return apply_if(jnp.any(finished), restart, carry)


def _on_host(tree: Part) -> Part:
    """Copies that the caller may change: a program may use its memory again."""
    copied: Part = jax.tree.map(np.array, jax.device_get(tree))
    return copied
