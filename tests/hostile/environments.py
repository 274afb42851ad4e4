"""Environments that attack the trainer; each does one thing that no environment should do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from toys import PointMass, State

Attack = Callable[[State, jax.Array], State]


def _reward(value: Callable[[State, jax.Array], Any]) -> Attack:
    return lambda state, age: state.replace(reward=jnp.asarray(value(state, age), jnp.float32))


def _observation(value: Callable[[jax.Array, jax.Array], Any]) -> Attack:
    return lambda state, age: state.replace(obs=jnp.asarray(value(state.obs, age), jnp.float32))


def _physics(value: Callable[[jax.Array, jax.Array], Any]) -> Attack:
    def attack(state: State, age: jax.Array) -> State:
        physics = state.pipeline_state
        return state.replace(pipeline_state=physics.replace(q=value(physics.q, age)))

    return attack


# The attack in every step, by its description. `age` counts the steps since the reset, from 1.
ATTACKS: dict[str, Attack] = {
    "every reward is NaN": _reward(lambda state, age: jnp.nan),
    "every reward is infinite": _reward(lambda state, age: jnp.inf),
    "every reward is 1e30": _reward(lambda state, age: 1e30),
    "rewards grow tenfold per step": _reward(lambda state, age: 10.0**age),
    "no reward is ever paid": _reward(lambda state, age: 0.0),
    "every third reward is NaN": _reward(lambda state, age: jnp.where(age % 3 > 1, jnp.nan, 1.0)),
    "observations never change": _observation(lambda obs, age: jnp.ones_like(obs)),
    "every observation is NaN": _observation(lambda obs, age: jnp.full_like(obs, jnp.nan)),
    "observations grow tenfold per step": _observation(lambda obs, age: obs * 10.0**age),
    "observations are the greatest float32": _observation(lambda obs, age: jnp.full_like(obs, 3e38)),
    "observations jump between 1e-6 and 1e6": _observation(lambda obs, age: obs * jnp.where(age % 2 > 0, 1e-6, 1e6)),
    "every step ends the episode": lambda state, age: state.replace(done=jnp.ones(())),
    "done is NaN": lambda state, age: state.replace(done=jnp.full((), jnp.nan)),
    "no step ends the episode": lambda state, age: state.replace(done=jnp.zeros(())),
    "the physics explodes": _physics(lambda q, age: q * 1e3**age),
    "the physics is NaN in every step": _physics(lambda q, age: jnp.full_like(q, jnp.nan)),
    "a metric is infinite": lambda state, age: state.replace(metrics={"distance": jnp.full((), jnp.inf)}),
}


class Hostile(PointMass):
    """A point mass under an attack.

    Args:
        attack: One of `ATTACKS`, or empty for none.
        bad_resets: Share of the resets whose observation is NaN.
    """

    def __init__(self, attack: str = "", bad_resets: float = 0.0):
        super().__init__(bad_resets=bad_resets)
        self._attack = ATTACKS[attack] if attack else lambda state, age: state

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        return state.replace(info={**state.info, "age": jnp.zeros(())})

    def step(self, state: State, action: jax.Array) -> State:
        age = state.info["age"] + 1.0
        state = super().step(state, action)
        return self._attack(state.replace(info={**state.info, "age": age}), age)
