"""Environments that are wrong without an injected fault."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from brax import envs

from scripts.stability.tasks import Late


class LatePendulum(Late):
    def __init__(self, begins: int, backend: str):
        super().__init__(envs.get_environment("inverted_pendulum", backend=backend), begins)


class UnstablePendulum:
    """A pendulum that multiplies a part of its model in one of 20 episodes, so that no integrator is stable."""

    def __init__(self, part: str, factor: float, backend: str):
        self._env = envs.get_environment("inverted_pendulum", backend=backend)
        self._part, self._factor = part, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self, rng: jax.Array) -> Any:
        state = self._env.reset(rng)
        wild = jax.random.bernoulli(jax.random.fold_in(rng, 1), 0.05)
        return state.replace(info={**state.info, "wild": wild.astype(jnp.float32)})

    def step(self, state: Any, action: jax.Array) -> Any:
        stable, wild = self._env.sys, state.info["wild"]
        changed = functools.reduce(getattr, self._part.split("."), stable) * (1.0 + wild * (self._factor - 1.0))
        self._env.sys = stable.tree_replace({self._part: changed})
        try:
            return self._env.step(state, action)
        finally:
            self._env.sys = stable
