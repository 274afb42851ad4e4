"""Entries of `info` that Playground's wrappers keep, compared with those wrappers key by key."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hostile.users import Remembering
from toys import step_alone

pytest.importorskip("mujoco_playground")
from mujoco_playground import State, wrapper

from rlstable.config.guards import GuardsConfig
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.ppo.guards import env_guards

pytestmark = pytest.mark.usefixtures("quick_compile")

COUNT, STEPS = 3, 6
# Of the wrapper alone, which an environment cannot see before its first step.
PRIVATE = {"AutoResetWrapper_rng", "AutoResetWrapper_first_data", "AutoResetWrapper_first_obs"}
# The full reset of Playground erases the report of the episode that ends, so that a time limit is a termination.
REPORT = {"truncation", "episode_done", "episode_metrics"}


class Task:
    """`Remembering` with the state of Playground."""

    action_size = 1

    def __init__(self) -> None:
        self.env, self.unwrapped = Remembering(), self

    def reset(self, rng: jax.Array) -> State:
        state = self.env.reset(rng)
        return State(state.pipeline_state, state.obs, state.reward, state.done, {}, state.info)

    def step(self, state: State, action: jax.Array) -> State:
        own = self.env.reset(jax.random.PRNGKey(0)).replace(pipeline_state=state.data, info=state.info)
        own = self.env.step(own, action)
        return state.replace(data=own.pipeline_state, obs=own.obs, reward=jnp.ones(()), done=own.done, info=own.info)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("full_reset", [False, True])
def test_info_equals_that_of_playground_key_by_key(full_reset: bool, guarded: bool) -> None:
    actions = jnp.zeros((STEPS, COUNT, 1)).at[2, 1].set(1.0)  # ends an episode
    keys = jax.random.split(jax.random.PRNGKey(0), COUNT)
    theirs = wrapper.wrap_for_brax_training(Task(), episode_length=5, full_reset=full_reset)
    ours = VectorEnv(Task(), 5, 1, env_guards(GuardsConfig()) if guarded else {}, reset_from_pool=full_reset)
    pool = pool_of(jax.device_get(ours.reset(keys))) if ours.uses_pool else None
    guard_state = {name: guard.init() for name, guard in ours.guards.items()}
    step = jax.jit(lambda state, action, pool: step_alone(ours, state, action, pool, keys[0], guard_state).state)
    states: list[Any] = [theirs.reset(keys), ours.reset(keys)]
    for action in actions:
        states = [jax.jit(theirs.step)(states[0], action), step(states[1], action, pool)]
        names = set(states[0].info) - PRIVATE
        assert names == set(states[1].info) - {"first_state"}
        for name in names - {"rng"} - (REPORT if full_reset else set()):
            own = {**states[1].info, "episode_metrics": states[1].info["episode_metrics"].unpacked()}
            jax.tree.map(np.testing.assert_array_equal, own[name], states[0].info[name])
