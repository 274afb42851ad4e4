"""Environments as users write them, a few lines each, which are legal and once were trained wrongly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from toys import Physics, State


class Cart:
    """A point on a line, pushed by the action: velocity 0.9 v + 0.1 a, position x + 0.1 v.

    Subclasses change `observe`, `reward` or `info`, and have class attributes that arguments replace.
    Reward 1 - |x - command|.
    """

    observation_size, action_size = 3, 1
    backend = None

    def __init__(self, **kwargs: Any):
        assert all(hasattr(self, name) for name in kwargs)
        vars(self).update(kwargs)

    def reset(self, rng: jax.Array) -> State:
        zero = jnp.zeros(())
        physics = Physics(0.1 * jax.random.normal(rng, (1,)), jnp.zeros(1), jnp.zeros(1))
        info = {"ticks": zero, "command": zero, "rng": rng}
        state = State(physics, jnp.zeros(3), zero, zero, {}, info)
        return state.replace(obs=self.observe(state))

    def step(self, state: State, action: jax.Array) -> State:
        velocity = 0.9 * state.pipeline_state.qd + 0.1 * jnp.clip(action, -1, 1)
        physics = state.pipeline_state.replace(q=state.pipeline_state.q + 0.1 * velocity, qd=velocity)
        state = state.replace(pipeline_state=physics, info={**state.info, **self.info(state.info)})
        return state.replace(obs=self.observe(state), reward=self.reward(state))

    def info(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"ticks": info["ticks"] + 1}

    def observe(self, state: State) -> jax.Array:
        return jnp.concatenate([state.pipeline_state.q, state.pipeline_state.qd, state.info["command"][None]])

    def reward(self, state: State) -> jax.Array:
        return 1.0 - jnp.abs(state.pipeline_state.q[0] - state.info["command"])


class LateCommand(Cart):
    """A command that is 0 for the first steps of each environment, and then a number in +-0.3 for 100 steps each."""

    late = 3000  # steps of an environment, over all its episodes, in which the command is 0

    def info(self, info: dict[str, Any]) -> dict[str, Any]:
        ticks = info["ticks"] + 1
        rng, key = jax.random.split(info["rng"])
        new = jax.random.uniform(key, minval=-0.3, maxval=0.3)
        draws = (ticks >= self.late) & ((ticks - self.late) % 100 == 0)
        return {"ticks": ticks, "rng": rng, "command": jnp.where(draws, new, info["command"])}


class Burst(Cart):
    """Observations of a million for some steps of each environment, over all its episodes."""

    first, last = 80, 104

    def observe(self, state: State) -> jax.Array:
        ticks = state.info["ticks"]
        size = jnp.where((ticks >= self.first) & (ticks <= self.last), 1e6, 1.0)
        return size * super().observe(state)


class Limited(Cart):
    """Has its own time limit, counted in `info`, which its reset alone starts again."""

    limit = 40  # steps of an episode
    truncates = False  # whether the end is a truncation in `info["truncation"]`

    def step(self, state: State, action: jax.Array) -> State:
        state = super().step(state, action)
        over = jnp.where(state.info["ticks"] >= self.limit, 1.0, 0.0)
        own = {"truncation": over} if self.truncates else {}
        return state.replace(done=over, info=state.info | own)


class Counting(Cart):
    """Ends after two steps, counted in the physics; metrics have names of training."""

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        zero = jnp.zeros(())
        return state.replace(metrics={name: zero for name in ("one", "reward", "reward_std", "sum_reward", "length")})

    def step(self, state: State, action: jax.Array) -> State:
        state = super().step(state, action)
        count = state.pipeline_state.warm_start + 1
        metrics = {**dict.fromkeys(state.metrics, jnp.full((), -7.0)), "one": jnp.ones(())}
        physics = state.pipeline_state.replace(warm_start=count)
        return state.replace(pipeline_state=physics, metrics=metrics, done=jnp.where(count[0] >= 2, 1.0, 0.0))

    def reward(self, state: State) -> jax.Array:
        return jnp.full((), 10.0)


@struct.dataclass
class RememberingState(State):
    """A state with two additional fields."""

    memory: jax.Array
    noise: jax.Array


class Remembering(Cart):
    """Remembers an average in an additional field of its state; action 2 makes it NaN, 3 and 4 the same in `info`."""

    typed = False  # whether random keys are typed

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        noise = jax.random.key(jax.random.bits(rng)) if self.typed else rng
        kept = "AutoResetWrapper_preserve_info", "AutoResetWrapper_done_count"
        info = {**state.info, kept[0]: {"level": jnp.zeros(())}, kept[1]: jnp.int32(0)}
        return RememberingState(**{**vars(state), "info": info}, memory=state.pipeline_state.q, noise=noise)

    def step(self, state: State, action: jax.Array) -> State:
        state = super().step(state, action)
        site = action[0]
        level = state.info["AutoResetWrapper_preserve_info"]["level"] + jnp.where(site == 4, jnp.nan, 1.0)
        info = {
            **state.info,
            "command": jnp.where(site == 3, jnp.nan, state.info["command"]),
            "AutoResetWrapper_preserve_info": {"level": level},
        }
        memory = jnp.where(site == 2, jnp.nan, 0.9 * state.memory + 0.1)
        return state.replace(memory=memory, info=info, done=jnp.where(site == 1, 1.0, 0.0))


class InInfo(Cart):
    """Keeps its physics in `info`, without `pipeline_state`."""

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        return state.replace(pipeline_state=None, info={**state.info, "physics": state.pipeline_state})

    def step(self, state: State, action: jax.Array) -> State:
        state = super().step(state.replace(pipeline_state=state.info["physics"]), action)
        return state.replace(pipeline_state=None, info={**state.info, "physics": state.pipeline_state})


class Units(Cart):
    """Observations and rewards in units of the user's choice."""

    unit, observation, offset = 1.0, 1.0, 0.0  # factor of rewards, factor of observations, added to observations

    def observe(self, state: State) -> jax.Array:
        return super().observe(state) * self.observation + self.offset

    def reward(self, state: State) -> jax.Array:
        return (super().reward(state) - 1.0) * self.unit


class SlashInAName(Cart):
    """Metrics named as in Playground, and two arrays whose names differ only in what separates them."""

    def reset(self, rng: jax.Array) -> State:
        zero, state = jnp.zeros(()), super().reset(rng)
        info = {**state.info, "gait/left": zero, "gait": {"left": zero + 1.0}}
        return state.replace(metrics={"reward/forward": zero}, info=info)


class LargeArray(Cart):
    """An array of 64 MB on the environment, of which each step reads a number."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.table = jnp.zeros(16_000_000)

    def reward(self, state: State) -> jax.Array:
        return super().reward(state) + self.table[state.info["ticks"].astype(jnp.int32)]
