"""Faults of an environment, in its resets and steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlstable.config import ConfigError
from rlstable.config.faults import FaultConfig
from rlstable.device.trees import Env, EnvState, Observation
from rlstable.envs.vector import VectorEnv
from rlstable.envs.wrapper import EnvWrapper
from rlstable.faults.injection import Injection, as_data
from rlstable.guards.env import physics, physics_field

_POSITIONS = ("q", "qpos")
# Additional entries in `info` and metrics of an environment with a fault. Some environments have no metrics and no
# floats in `info` that a fault could change.
PROBES = _KEY, _PROBE = ("injection_key", "injection_probe")


class FaultyEnv(EnvWrapper):
    """One environment with faults in its resets and steps."""

    def __init__(self, env: Env, injection: Injection):
        super().__init__(env)
        self._injection = injection

    def reset(self, rng: jax.Array) -> EnvState:
        state = self.env.reset(rng)
        key, key_reset = jax.random.split(jax.random.fold_in(rng, 1))
        hit = self._injection.hits("reset", key_reset)
        state = _corrupt_physics(state, _POSITIONS, hit, self._injection.fault.value)
        state = state.replace(obs=_corrupt_observation(state.obs, hit, self._injection.fault.value))
        zero = jnp.zeros(())
        info = {**state.info, _KEY: key, _PROBE: zero}
        return state.replace(info=info, metrics={**state.metrics, _PROBE: zero})

    def step(self, state: EnvState, action: jax.Array) -> EnvState:
        injection, value = self._injection, self._injection.fault.value
        info = dict(state.info)
        key, probe = info.pop(_KEY), info.pop(_PROBE)
        key, draw = jax.random.split(key)
        action = action.at[0].set(injection.put("action", draw, action[0]))
        metrics = {name: x for name, x in state.metrics.items() if name != _PROBE}
        state = self.env.step(state.replace(info=info, metrics=metrics), action)
        bad_physics, bad_warm_start = injection.hits("physics", draw), injection.hits("warm_start", draw)
        state = _corrupt_physics(state, _POSITIONS, bad_physics, value)
        state = _corrupt_physics(state, ("qacc_warmstart",), bad_warm_start, value)
        # Bad physics shows in the observation of the same step.
        bad_observation = bad_physics | injection.hits("observation", draw)
        info = {**state.info, _KEY: key, _PROBE: injection.put("info", draw, probe)}
        return state.replace(
            obs=_corrupt_observation(state.obs, bad_observation, value),
            reward=injection.put("reward", draw, state.reward),
            done=injection.put("done", draw, state.done),
            metrics={**state.metrics, _PROBE: injection.put("metrics", draw, jnp.zeros(()))},
            info=info,
        )


def _corrupt_physics(state: EnvState, names: tuple[str, ...], hit: jax.Array, value: jax.Array) -> EnvState:
    """Overwrites the first element of the named physics arrays, if the physics has them and the fault hits."""
    simulated = physics(state)
    arrays = {name: getattr(simulated, name) for name in names if getattr(simulated, name, None) is not None}
    corrupted = {name: x.at[0].set(jnp.where(hit, value.astype(x.dtype), x[0])) for name, x in arrays.items()}
    return state.replace(**{physics_field(state): simulated.replace(**corrupted)}) if corrupted else state


def _corrupt_observation(observation: Observation, hit: jax.Array, value: jax.Array) -> Observation:
    """Overwrites the first element of every part of the observation, if the fault hits."""
    return jax.tree.map(lambda x: x.at[..., 0].set(jnp.where(hit, value.astype(x.dtype), x[..., 0])), observation)


def inject_into(env: Any, injection: Injection) -> VectorEnv:
    """The environments with this fault instead of any earlier one."""
    healthy = env.env.env if isinstance(env.env, FaultyEnv) else env.env
    return dataclasses.replace(env, env=FaultyEnv(healthy, injection))


def faulty_env(env: VectorEnv, config: FaultConfig) -> VectorEnv:
    """Environments with their fault, active from the first reset; a `ConfigError` if the physics lacks its site."""
    if config.site is None:
        return env
    sample = jax.eval_shape(env.env.reset, jax.random.PRNGKey(0))
    if config.site == "warm_start" and getattr(physics(sample), "qacc_warmstart", None) is None:
        raise ConfigError("fault.site: warm_start needs an environment of MuJoCo's, e.g. env.backend=mjx")
    return inject_into(env, Injection(as_data(config), jnp.ones((), bool)))
