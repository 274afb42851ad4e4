"""Small environments as users write them: units, constants, curricula, sparse and delayed rewards, noise.

Each environment is a `Point` with other fields, so that one class describes all. The dynamics of each coordinate are
velocity 0.9 v + 0.1 a, position x + 0.1 v; the reward is 1 - |x - command| unless a field says otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from brax.envs.base import State

from scripts.stability.tasks import Point as Physics


class Point:
    backend = None

    def __init__(
        self,
        size: int = 1,  # number of coordinates, and of actions
        idle: int = 0,  # additional actions without effect
        reward: str = "near",  # name in `_REWARDS`
        scale: float = 1.0,  # factor of the reward
        offset: float = 0.0,  # added to each reward
        obs_scale: float = 1.0,
        obs_offset: float = 0.0,
        extra: str | None = None,  # name in `_EXTRAS` of additional elements of the observation
        cue: int | None = None,  # steps of an episode that show a command, which holds for the whole episode
        late: int | None = None,  # steps, over all episodes, before a command replaces the command 0
        noise: float = 0.0,  # deviation, of the observation
        spikes: float = 0.0,  # probability per step that the observation is `spike`
        spike: float = 1e4,
        spiked: str = "all",  # all observations, those of the critic alone, or the last of each episode
        reward_noise: float = 0.0,  # deviation
        reward_spikes: float = 0.0,  # probability per step of a reward of 1,000 or -1,000
        delay: int = 1,  # steps between rewards, which are summed
        limit: float | None = None,  # position beyond which the episode ends
        unstable: float = 0.0,  # growth of the position per step
        nan_share: float = 0.0,  # probability per step that the velocity becomes NaN
        strength: float = 1.0,  # factor of the action
        stops: bool = False,  # whether the episode ends at the goal
        harder: int | None = None,  # steps, over all episodes, after which actions have half the effect
        blind: bool = False,  # whether the observation lacks velocities
    ):
        vars(self).update({name: value for name, value in locals().items() if name != "self"})
        self.action_size = size + idle
        elements = size * (1 if blind else 2) + 1 + (0 if extra is None else len(_EXTRAS[extra](0.0, 0.0)))
        of_critic = spiked == "critic"
        self.observation_size = {"state": elements, "privileged_state": elements} if of_critic else elements

    def reset(self, rng: jax.Array) -> State:
        rng, key = jax.random.split(rng)
        zero = jnp.zeros(())
        start = jax.random.uniform(key, (self.size,), minval=-1.0, maxval=1.0) * (self.limit or 2.0) / 2.0
        physics = Physics(start, jnp.zeros(self.size))
        command = zero if self.cue is None else jax.random.uniform(jax.random.fold_in(key, 1), minval=-1.0)
        info = {"ticks": zero, "age": zero, "command": command, "sum": zero, "rng": rng}
        return State(physics, self._observe(physics, info, rng), zero, zero, {}, info)

    def step(self, state: State, action: jax.Array) -> State:
        rng, *keys = jax.random.split(state.info["rng"], 6)
        info, age = state.info, state.info["age"] + 1
        command = info["command"]
        if self.late is not None:
            new = jax.random.uniform(keys[0], minval=-0.3, maxval=0.3)
            command = jnp.where((age >= self.late) & (age % 50 == 0), new, command)
        force = self.strength * jnp.clip(action[: self.size], -1, 1)
        if self.harder is not None:
            force = jnp.where(age > self.harder, 0.5, 1.0) * force
        velocity = 0.9 * state.pipeline_state.qd + 0.1 * force + self.unstable * state.pipeline_state.q
        velocity = jnp.where(jax.random.bernoulli(keys[1], self.nan_share), jnp.nan, velocity)
        physics = Physics(state.pipeline_state.q + 0.1 * velocity, velocity)
        error = jnp.mean(jnp.abs(physics.q - command))
        earned = _REWARDS[self.reward](error, action, age) + self.reward_noise * jax.random.normal(keys[2])
        sign = jnp.where(jax.random.bernoulli(keys[3]), 1000.0, -1000.0)
        earned += jnp.where(jax.random.bernoulli(keys[4], self.reward_spikes), sign, 0.0)
        total, ticks = info["sum"] + self.scale * earned + self.offset, info["ticks"] + 1
        pays = ticks % self.delay == 0
        over = jnp.zeros((), bool)
        if self.limit is not None:
            over |= jnp.max(jnp.abs(physics.q)) > self.limit
        if self.stops:
            over |= error < 0.1
        pays |= over
        info = {
            **info, "ticks": ticks, "age": age, "command": command, "sum": jnp.where(pays, 0.0, total), "rng": rng,
        }  # fmt: skip
        reward, done = jnp.where(pays, total, 0.0), jnp.where(over, 1.0, 0.0)
        return state.replace(
            pipeline_state=physics, obs=self._observe(physics, info, rng), reward=reward, done=done, info=info
        )

    def _observe(self, physics: Physics, info: dict[str, Any], rng: jax.Array) -> Any:
        command = jnp.where(info["ticks"] < (_LENGTH if self.cue is None else self.cue), info["command"], 0.0)
        parts = [physics.q, command[None]] + ([] if self.blind else [physics.qd])
        if self.extra is not None:
            parts.append(jnp.stack([jnp.float32(x) for x in _EXTRAS[self.extra](info["ticks"], info["age"])]))
        obs = jnp.concatenate(parts)
        obs = obs + self.noise * jax.random.normal(jax.random.fold_in(rng, 1), obs.shape)
        is_spike = jax.random.bernoulli(jax.random.fold_in(rng, 2), self.spikes)
        if self.spiked == "last":
            is_spike &= info["ticks"] % _LENGTH == 0
        spiked = jnp.where(is_spike, self.spike, obs) * self.obs_scale + self.obs_offset
        return {"state": obs, "privileged_state": spiked} if self.spiked == "critic" else spiked


_LENGTH = 100  # usual steps of an episode
_REWARDS: dict[str, Any] = {
    "near": lambda error, action, age: 1.0 - error,
    "square": lambda error, action, age: -(error**2),
    "sparse": lambda error, action, age: jnp.where(error < 0.05, 1.0, 0.0),
    "lost": lambda error, action, age: jnp.where(error < 0.05, 0.0, -1.0),
    "energy": lambda error, action, age: 1.0 - error - 0.3 * jnp.sum(action**2),
    "sharp": lambda error, action, age: jnp.exp(-10.0 * error),
    "stricter": lambda error, action, age: jnp.exp(-error * jnp.minimum(1.0 + age / 300.0, 10.0)),
    "prize": lambda error, action, age: jnp.where(error > 2.0, 300.0, 0.02 * (1.0 - error)),
    "alive": lambda error, action, age: 1.0 + 0.0 * error,
}
_EXTRAS: dict[str, Any] = {
    "constants": lambda ticks, age: [0.0, 1.0, -40.0, 1e5],
    "flag": lambda ticks, age: [jnp.where(age > 3000, 1.0, 0.0)],
    "clock": lambda ticks, age: [ticks, age],
    "many": lambda ticks, age: [jnp.sin(index + 0.1 * ticks) for index in range(60)],
}


class Case(NamedTuple):
    text: str  # for the page
    kwargs: dict[str, Any]  # arguments of `Point`
    length: int = _LENGTH  # steps of an episode
    eval_kwargs: dict[str, Any] = {}  # noqa: RUF012 - read only; of the environments of evaluations
    overrides: tuple[str, ...] = ()


CASES = {
    "plain": Case("one coordinate, reward about 1", {}),
    "large_reward": Case("rewards in units of 20,000", {"scale": 20_000.0}),
    "small_reward": Case("rewards in units of 1e-6", {"scale": 1e-6}),
    "negative": Case("squared error, all returns negative", {"reward": "square"}),
    "offset": Case("100 subtracted from each reward", {"offset": -100.0}),
    "large_observation": Case("observations of 1e6 (Pa, um)", {"obs_scale": 1e6}),
    "small_observation": Case("observations of 1e-5", {"obs_scale": 1e-5}),
    "far_observation": Case("observations around 1,000", {"obs_offset": 1000.0}),
    "constants": Case("four constant observations, 0 to 1e5", {"extra": "constants"}),
    "late_command": Case("a command that begins after 3,000 steps", {"late": 3000}, eval_kwargs={"late": 1}),
    "late_flag": Case("a flag that becomes 1 after 3,000 steps", {"extra": "flag"}),
    "clock": Case("a clock and an age that grows for ever", {"extra": "clock"}),
    "many_observations": Case("60 oscillating distractors", {"extra": "many"}),
    "sparse": Case("reward 1 within 0.05 of the goal only", {"reward": "sparse"}),
    "lost": Case("-1 per step until within 0.05 of the goal", {"reward": "lost"}),
    "sharp": Case("reward exp(-10 error)", {"reward": "sharp", "size": 2}),
    "delayed": Case("rewards paid every 20 steps", {"delay": 20}),
    "at_the_end": Case("reward paid at the last step only", {"delay": 100}),
    "one_step": Case("episodes of one step", {"strength": 30.0, "reward": "square"}, 1),
    "short": Case("episodes of five steps", {"strength": 10.0}, 5),
    "long": Case("episodes of 1,000 steps", {}, 1000),
    "many_actions": Case("12 coordinates and actions", {"size": 12}),
    "idle_actions": Case("one action works, 15 do nothing", {"idle": 15}),
    "energy": Case("a cost of the action", {"reward": "energy"}),
    "falls": Case("an unstable point, the episode ends when it falls",
                  {"unstable": 0.15, "limit": 1.0, "reward": "alive"}),
    "goal_ends": Case("-1 per step until the goal ends the episode", {"reward": "lost", "stops": True}),
    "prize": Case("0.02 for being near the goal, 300 for leaving", {"reward": "prize", "limit": 2.0}),
    "noisy_observation": Case("noise of 0.3 in the observation", {"noise": 0.3}),
    "noisy_reward": Case("noise of 5 in the reward", {"reward_noise": 5.0}),
    "observation_spikes": Case("one observation of 1,000 is 1e4", {"spikes": 0.001}),
    "critic_spikes": Case("one observation of 1,000 of the critic alone is 1e6",
                          {"spikes": 0.001, "spike": 1e6, "spiked": "critic"},
                          overrides=("network.value_obs_key=privileged_state",)),
    "last_spikes": Case("one of ten last observations of episodes is 1e6",
                        {"spikes": 0.1, "spike": 1e6, "spiked": "last"}),
    "reward_spikes": Case("one reward of 1,000 is 1,000 or -1,000", {"reward_spikes": 0.001}),
    "stricter": Case("a reward that becomes stricter with the age", {"reward": "stricter"}),
    "weaker": Case("motors at half strength after 2,000 steps", {"harder": 2000}, eval_kwargs={"harder": 0}),
    "cue": Case("a command that only the first five steps show", {"cue": 5}),
    "cue_gru": Case("the same, with a GRU and unrolls of 50 steps", {"cue": 5},
                    overrides=("network.recurrent=gru", "ppo.unroll_length=50")),
    "blind": Case("no velocities in the observation", {"blind": True}),
    "nan": Case("one velocity of 5,000 is NaN", {"nan_share": 0.0002}),
}  # fmt: skip
