"""A toy environment with one of the mistakes that users make in the interface, chosen by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from toys import Physics, State

Change = Callable[[Any], Any]


@struct.dataclass
class Other(Physics):
    """The same fields in another class."""


class Mistaken:
    """A point that is pushed along a line.

    Args:
        mistake: Key of `RESET` or `STEP`, whose function changes the returned state.
        action_size: Of the environment.
    """

    observation_size = 2

    def __init__(self, mistake: str = "none", action_size: Any = 1):
        self.mistake = mistake
        self.action_size = action_size

    def reset(self, rng: jax.Array) -> Any:
        seen = jax.random.uniform(rng, (2,))
        zero = jnp.zeros(())
        info = {"age": jnp.int32(0)}
        state = State(Physics(seen, seen, jnp.zeros(1)), seen, zero, zero, {"distance": zero}, info)
        return RESET.get(self.mistake, _unchanged)(state)

    def step(self, state: Any, action: jax.Array) -> Any:
        q = state.pipeline_state.q + 0.1 * action[0]
        info = {**state.info, "age": state.info["age"] + 1}
        metrics = {"distance": jnp.abs(q[0])}
        reward = 1.0 - jnp.abs(q[0])
        done = jnp.where(jnp.abs(q[0]) > 2.0, 1.0, 0.0)
        physics = state.pipeline_state.replace(q=q)
        after = state.replace(pipeline_state=physics, obs=q, reward=reward, done=done, metrics=metrics, info=info)
        return STEP.get(self.mistake, _unchanged)(after)


def _unchanged(state: State) -> State:
    return state


def _info(**entries: Any) -> Change:
    return lambda state: state.replace(info={**state.info, **entries})


def _metrics(**metrics: Any) -> Change:
    return lambda state: state.replace(metrics=metrics)


def _warm_start(value: Any) -> Change:
    return lambda state: state.replace(pipeline_state=state.pipeline_state.replace(warm_start=value))


def _reward_vector(state: State) -> State:
    return state.replace(reward=state.reward[None])


def _observation_matrix(state: State) -> State:
    return state.replace(obs=state.obs[None])


def _shapes(state: State) -> State:
    return state.replace(obs=state.obs + jnp.zeros(3))  # raises: shapes


def _if(state: State) -> State:
    if state.obs[0] > 0:  # raises: if
        return state
    return state.replace(reward=jnp.zeros(()))


def _numpy(state: State) -> State:
    return state.replace(reward=jnp.float32(np.sin(state.obs[0])))  # raises: numpy


def _missing(state: State) -> State:
    return state.replace(reward=state.info["goal"])  # raises: missing


_calls, _kept = itertools.count(), dict[str, Any]()  # values of Python that outlast a call


def _keeps_goal(state: State) -> State:
    _kept["goal"] = state.obs[0]
    return state


def _caches(state: State) -> State:
    """Computes a constant at the first call, and keeps a value for the rest of the call."""
    _kept["now"] = state.info["age"]
    return state.replace(reward=state.reward * _kept.setdefault("scale", 0.5) + 0.0 * _kept["now"])


def _draws_with_numpy(state: State) -> State:
    goal = jax.lax.fori_loop(0, 2, lambda _, x: x + np.random.uniform(size=2), jnp.zeros(2))
    return state.replace(obs=state.obs + goal)


def _host(state: State) -> State:
    like = jax.ShapeDtypeStruct((), jnp.float32)
    return state.replace(reward=jax.pure_callback(np.abs, like, state.reward))  # raises: host


def _part(name: str, other: Any) -> Change:
    """Observations in a dictionary, in which this part is no vector."""
    return lambda state: state.replace(obs={"state": state.obs, "vector": state.obs} | {name: other})


PARTS = {"dict": {"x": jnp.zeros(1)}, "float32[]": jnp.zeros(()), "uint8[4,4,3]": jnp.zeros((4, 4, 3), jnp.uint8)}
NAMED = {f"{name} {kind}": _part(name, part) for name in ("state", "other") for kind, part in PARTS.items()}


RESET: dict[str, Change] = {
    "reward_vector": _reward_vector,
    "metric_vector": _metrics(distance=np.zeros(3, np.float32)),
    "metric_int": _metrics(distance=np.int32(0)),
    "info_weak": lambda state: state.replace(info={"age": 0, "goal": 0.0}),
    "info_text": _info(name="text"),
    "info_reserved": _info(first_state=jnp.zeros(2)),
    "observation_matrix": _observation_matrix,
    "gym": lambda state: (state.obs, state.info),
    "shapes": _shapes,
    "python_counter_in_reset": lambda state: state.replace(obs=state.obs + 0.01 * next(_calls)),
    "numpy_goal": _draws_with_numpy,
    "traced_goal": _keeps_goal,
    **NAMED,
}
STEP: dict[str, Change] = {
    "reward_vector": _reward_vector,
    "reward_vector_step": _reward_vector,
    "reward_int_step": lambda state: state.replace(reward=jnp.int32(1)),
    "info_added": _info(speed=np.zeros(3, np.float32)),
    "info_new": lambda state: state.replace(info={"age": state.info["age"]}),
    "info_shape": lambda state: state.replace(info={**state.info, "age": state.info["age"][None]}),
    "metric_dropped": _metrics(),
    "metric_vector": _metrics(distance=np.zeros(3, np.float32)),
    "metric_int": _metrics(distance=np.int32(0)),
    "observation_matrix": _observation_matrix,
    "physics_int": _warm_start(np.zeros(1, np.int32)),
    "physics_class": lambda state: state.replace(pipeline_state=Other(**vars(state.pipeline_state))),
    "gym_step": lambda state: (state.obs, state.reward, state.done, state.info),
    "if": _if,
    "numpy": _numpy,
    "missing": _missing,
    "python_counter": lambda state: state.replace(reward=state.reward + 0.01 * next(_calls)),
    "numpy_noise": lambda state: state.replace(reward=state.reward + np.random.normal()),
    "traced_goal": lambda state: state.replace(reward=state.reward - _kept["goal"]),
    "cache": _caches,
    "host": _host,
    **NAMED,
}
