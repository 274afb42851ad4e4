"""A toy environment with one of the mistakes that users make in the interface, chosen by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from toys import Physics, State


@struct.dataclass
class Other(Physics):
    """The same fields in another class."""


class Mistaken:
    """A point that is pushed along a line.

    Args:
        mistake: Name of a method `reset_<mistake>` or `step_<mistake>`, which changes the returned state.
        action_size: Of the environment.
        observation_size: Of the environment; an observation has 2 numbers.
    """

    def __init__(self, mistake: str = "none", action_size: Any = 1, observation_size: Any = 2):
        self.mistake = mistake
        self.action_size = action_size
        self.observation_size = observation_size

    def reset(self, rng: jax.Array) -> Any:
        seen = jax.random.uniform(rng, (2,))
        zero = jnp.zeros(())
        info = {"age": jnp.int32(0)}
        state = State(Physics(seen, seen, jnp.zeros(1)), seen, zero, zero, {"distance": zero}, info)
        return getattr(self, f"reset_{self.mistake}", lambda state: state)(state)

    def step(self, state: Any, action: jax.Array) -> Any:
        q = state.pipeline_state.q + 0.1 * action[0]
        info = {**state.info, "age": state.info["age"] + 1}
        metrics = {"distance": jnp.abs(q[0])}
        reward = 1.0 - jnp.abs(q[0])
        done = jnp.where(jnp.abs(q[0]) > 2.0, 1.0, 0.0)
        physics = state.pipeline_state.replace(q=q)
        after = state.replace(pipeline_state=physics, obs=q, reward=reward, done=done, metrics=metrics, info=info)
        return getattr(self, f"step_{self.mistake}", lambda state: state)(after)

    def reset_reward_vector(self, state: State) -> State:
        return state.replace(reward=state.reward[None])

    def step_reward_vector(self, state: State) -> State:
        return state.replace(reward=state.reward[None])

    def step_reward_vector_step(self, state: State) -> State:
        return state.replace(reward=state.reward[None])

    def reset_reward_int(self, state: State) -> State:
        return state.replace(reward=0)

    def step_reward_int_step(self, state: State) -> State:
        return state.replace(reward=jnp.int32(1))

    def step_reward_python(self, state: State) -> State:
        return state.replace(reward=1.0)

    def reset_done_bool(self, state: State) -> State:
        return state.replace(done=jnp.bool_(False))

    def step_done_bool(self, state: State) -> State:
        return state.replace(done=state.done > 0)

    def step_done_bool_step(self, state: State) -> State:
        return state.replace(done=state.done > 0)

    def reset_done_int(self, state: State) -> State:
        return state.replace(done=jnp.int32(0))

    def step_info_added(self, state: State) -> State:
        return state.replace(info={**state.info, "speed": jnp.zeros(3)})

    def step_info_new(self, state: State) -> State:
        return state.replace(info={"age": state.info["age"]})

    def step_metric_added(self, state: State) -> State:
        return state.replace(metrics={**state.metrics, "speed": jnp.zeros(())})

    def step_metric_dropped(self, state: State) -> State:
        return state.replace(metrics={})

    def reset_metric_vector(self, state: State) -> State:
        return state.replace(metrics={"distance": jnp.zeros(3)})

    def step_metric_vector(self, state: State) -> State:
        return state.replace(metrics={"distance": jnp.zeros(3)})

    def reset_metric_int(self, state: State) -> State:
        return state.replace(metrics={"distance": jnp.int32(0)})

    def step_metric_int(self, state: State) -> State:
        return state.replace(metrics={"distance": jnp.int32(0)})

    def step_info_float(self, state: State) -> State:
        return state.replace(info={**state.info, "age": state.info["age"] * 0.5})

    def reset_info_weak(self, state: State) -> State:
        return state.replace(info={"age": 0, "goal": 0.0})

    def step_info_shape(self, state: State) -> State:
        return state.replace(info={**state.info, "age": state.info["age"][None]})

    def reset_info_text(self, state: State) -> State:
        return state.replace(info={**state.info, "name": "text"})

    def step_observation_shape(self, state: State) -> State:
        return state.replace(obs=state.obs[:1])

    def reset_observation_matrix(self, state: State) -> State:
        return state.replace(obs=state.obs[None])

    def step_observation_matrix(self, state: State) -> State:
        return state.replace(obs=state.obs[None])

    def reset_observation_tuple(self, state: State) -> State:
        return state.replace(obs=(state.obs, state.obs))

    def step_observation_tuple(self, state: State) -> State:
        return state.replace(obs=(state.obs, state.obs))

    def step_physics_shape(self, state: State) -> State:
        return state.replace(pipeline_state=state.pipeline_state.replace(warm_start=jnp.zeros(2)))

    def step_physics_int(self, state: State) -> State:
        return state.replace(pipeline_state=state.pipeline_state.replace(warm_start=jnp.zeros(1, jnp.int32)))

    def reset_gym(self, state: State) -> Any:
        return state.obs, state.info

    def step_gym_step(self, state: State) -> Any:
        return state.obs, state.reward, state.done, state.info

    def step_if(self, state: State) -> State:
        if state.obs[0] > 0:  # raises: if
            return state
        return state.replace(reward=jnp.zeros(()))

    def step_numpy(self, state: State) -> State:
        return state.replace(reward=jnp.float32(np.sin(state.obs[0])))  # raises: numpy

    def step_missing(self, state: State) -> State:
        return state.replace(reward=state.info["goal"])  # raises: missing

    def reset_shapes(self, state: State) -> State:
        return state.replace(obs=state.obs + jnp.zeros(3))  # raises: shapes

    def step_physics_class(self, state: State) -> State:
        return state.replace(pipeline_state=Other(**vars(state.pipeline_state)))

    def step_two(self, state: State) -> State:
        return state.replace(info={**state.info, "a": 1.0, "b": 1.0})
