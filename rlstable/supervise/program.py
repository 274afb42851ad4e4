"""The training program of a configuration, without a training state: nothing is reset, stepped or allocated for it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlstable import sharding
from rlstable.config import Config
from rlstable.envs.wrappers import VectorEnv, pool_of
from rlstable.guards.env import env_guards
from rlstable.ppo.build import init_state, make_ppo
from rlstable.ppo.iteration import PPO
from rlstable.ppo.state import SPECS, TrainState


def assemble(config: Config, env: Any) -> PPO:
    """What trains `env`, as the runner puts it together."""
    vector_env = VectorEnv(
        env,
        config.env.episode_length,
        config.env.action_repeat,
        env_guards(config.guards),
        config.env.reset == "pool",
    )
    return make_ppo(config, vector_env, env.action_size)


def state_shapes(ppo: PPO, mesh: Mesh) -> TrainState:
    """Shapes, types and places of the first training state.

    Args:
        ppo: What will train.
        mesh: The devices.
    """
    vector_env: Any = ppo.env
    key = jax.random.PRNGKey(0)

    def first_states(count: int) -> Any:
        return jax.eval_shape(lambda key: vector_env.reset(jax.random.split(key, count)), key)

    settings = ppo.config
    pool = None
    if vector_env.draws:
        # Packed on the host, so from arrays; a pool is small.
        pool = pool_of(jax.tree.map(_blank, first_states(settings.env.reset_pool_size * mesh.size)))
    state = jax.eval_shape(functools.partial(init_state, ppo), key, first_states(settings.ppo.num_envs), pool)
    return sharding.placeholders(state, mesh, SPECS)


def compile_training(ppo: PPO, mesh: Mesh) -> Any:
    """The compiled iteration, the same program that the runner compiles."""
    program = sharding.over_devices(ppo.iteration, mesh, (SPECS,), (SPECS, sharding.REPLICATED), donate=(0,))
    return program.lower(state_shapes(ppo, mesh)).compile()


def bytes_of(shapes: Any) -> int:
    """Bytes of all arrays of a pytree, over all devices."""
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def _blank(x: jax.ShapeDtypeStruct) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), x.shape)
    return np.zeros(x.shape, x.dtype)
