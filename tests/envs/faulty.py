"""A toy environment with faults chosen by the action: the place, the bad number and the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from toys import State

SITES = ("physics", "scratch", "observation", "reward", "done", "metrics", "info")
VALUES = (float("nan"), float("inf"), -float("inf"), 1e30)
BOUND = 1.0


@struct.dataclass
class Physics:
    """A point on a line. A bad `q` stays bad; every step overwrites `scratch`; `t` counts steps."""

    q: jax.Array
    qd: jax.Array
    scratch: jax.Array
    ident: jax.Array
    t: jax.Array


@struct.dataclass
class PlaygroundState:
    """The fields of MuJoCo Playground."""

    data: Physics
    obs: Any
    reward: jax.Array
    done: jax.Array
    metrics: dict[str, jax.Array]
    info: dict[str, Any]


class Faulty:
    """Takes actions `[push, site, value]`: site 0 is no fault, site 1 + i is SITES[i], value is an index in VALUES.

    Each episode has a random `ident` in physics, observation and info, so that a mixture of two episodes shows. As in
    Brax, the end of an episode is a comparison, which NaN does not trigger, and one metric is called `reward`.

    Args:
        named: Whether observations are a dictionary.
        data: Whether the physics field is called `data`, as in Playground.
        period: Faults act only in steps `phase`, `phase + period`, ... of an episode; action repeats count.
        phase: See `period`.
    """

    action_size = 3
    backend = "toy"

    def __init__(self, named: bool = False, data: bool = False, period: int = 1, phase: int = 0):
        self.named = named
        self.field = "data" if data else "pipeline_state"
        self.state_class: Any = PlaygroundState if data else State
        self.period = period
        self.phase = phase

    def reset(self, rng: jax.Array) -> Any:
        key, draw = jax.random.split(rng)
        q, qd, ident = jax.random.uniform(draw, (3,), minval=-0.5, maxval=0.5)
        physics = Physics(q[None], qd[None], jnp.zeros(2), ident, jnp.int32(0))
        zero = jnp.zeros(())
        info = {"time_out": zero, "ident": ident, "sum": zero, "calls": jnp.int32(0), "key": key}
        metrics = {"reward": zero, "speed": zero}
        return self.state_class(physics, self._observation(physics), zero, zero, metrics, info)

    def step(self, state: Any, action: jax.Array) -> Any:
        old, info = getattr(state, self.field), state.info
        push, site, value = action[0], action[1].astype(jnp.int32), action[2].astype(jnp.int32)
        fires = (old.t % self.period) == self.phase

        def at(name: str, x: jax.Array) -> jax.Array:
            hit = fires & (site == 1 + SITES.index(name))
            return jnp.where(hit, jnp.array(VALUES)[value], x)

        qd = 0.75 * old.qd + 0.25 * push
        physics = Physics(
            at("physics", old.q + 0.25 * qd), qd, at("scratch", old.scratch * 0.0 + push), old.ident, old.t + 1
        )
        observation = self._observation(physics)
        observation = jax.tree.map(lambda x: x.at[1].set(at("observation", x[1])), observation)
        reward = at("reward", 1.0 - jnp.square(physics.q[0]))
        done = jnp.where(jnp.abs(physics.q[0]) > BOUND, 1.0, 0.0)
        return state.replace(
            **{self.field: physics},
            obs=observation,
            reward=reward,
            done=at("done", done),
            metrics={"reward": reward, "speed": at("metrics", jnp.abs(qd[0]))},
            info=info | {"time_out": done, "sum": at("info", info["sum"] + 1.0), "calls": info["calls"] + 1},
        )

    def _observation(self, physics: Physics) -> Any:
        observation = jnp.concatenate([physics.q, physics.qd, physics.ident[None]])
        return {"state": observation, "privileged_state": observation * 2.0} if self.named else observation
