"""Rejects sizes that fit with no memory plan, before anything compiles."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import Mesh

from rlstable.config import Config, ConfigError
from rlstable.supervise import memory
from rlstable.supervise.memory import bytes_of, readable

_FLOAT = 4  # bytes of a float32
_SCALARS = 3  # reward, truncation, termination
_COPIES = 3  # every weight has two moments in the optimizer


def experience_bytes(config: Config, observation: Any, action_size: int) -> tuple[int, int]:
    """Lower bound of the bytes that the experience of one iteration takes, over all devices.

    Counts one copy of observations, actions, rewards and ends of episodes. No memory plan makes the experience smaller:
    fewer environments collect the same batch in more unrolls.

    Args:
        config: The whole configuration.
        observation: Shapes of the observations that the networks read, `[B, ...]` each.
        action_size: Elements of an action.

    Returns:
        Bytes of the whole batch, and of one environment step.
    """
    observation_bytes = sum(bytes_of(x) // x.shape[0] for x in jax.tree.leaves(observation))
    step = observation_bytes + _FLOAT * (action_size + _SCALARS)
    return config.ppo.rows * (config.ppo.unroll_length * step + observation_bytes), step


def _weights(config: Config, observation: Any, action_size: int) -> dict[str, int]:
    """Lower bound of the weights of each network, by its key."""
    network = config.network

    def weights(key: str, hidden: tuple[int, ...], outputs: int) -> int:
        shape = (observation[key] if isinstance(observation, Mapping) else observation).shape
        return sum(inputs * units for inputs, units in pairwise((shape[-1], *hidden, outputs)))

    outputs = network.num_quantiles if network.use_distributional_critic else 1
    return {
        "policy": weights(network.policy_obs_key, network.policy_hidden_layer_sizes, action_size),
        "value": weights(network.value_obs_key, network.value_hidden_layer_sizes, outputs),
    }


def require_memory(config: Config, mesh: Mesh, env_state: Any, observation: Any, action_size: int) -> None:
    """Checks that experience and networks fit on the devices, and the states of environments in the host's memory.

    No memory plan can divide these parts. The sizes are lower bounds and swap space counts as memory of the host, so a
    configuration that might fit always passes. With `supervise.memory.adapt=false` nothing is checked.

    Args:
        config: The whole configuration.
        mesh: The devices.
        env_state: Shapes of the first states, `[num_envs]`.
        observation: Shapes of the observations that the networks read.
        action_size: Elements of an action.

    Raises:
        ConfigError: A part is larger than all memory; the message names the keys and the largest size that could fit.
    """
    if not config.supervise.memory.adapt:
        return
    ppo, device = config.ppo, mesh.local_devices[0]
    processes = mesh.size // len(mesh.local_devices)
    share = processes if device.platform == "cpu" else mesh.size  # CPU devices of a process share one memory
    batch, step = experience_bytes(config, observation, action_size)
    limit = memory.limit(device, config.supervise.memory.limit_gib)
    if limit is not None and batch > limit * share:
        steps = ppo.rows * ppo.unroll_length
        raise ConfigError(
            f"ppo.batch_size: one iteration is {steps:,} environment steps (ppo.batch_size * ppo.num_minibatches * "
            f"ppo.unroll_length) and takes at least {readable(batch)} of {readable(limit * share)} memory; at most "
            f"{limit * share // step:,} steps could fit"
        )
    weights = _weights(config, observation, action_size)
    each = _FLOAT * _COPIES * mesh.size  # bytes of a weight: every device has all of them
    if limit is not None and sum(weights.values()) * each > limit * share:
        larger = max(weights, key=lambda name: weights[name])
        raise ConfigError(
            f"network.{larger}_hidden_layer_sizes: the networks have at least {sum(weights.values()):,} weights and "
            f"take at least {readable(sum(weights.values()) * each)} of {readable(limit * share)} memory; at most "
            f"{limit * share // each:,} weights could fit"
        )
    states, host = bytes_of(env_state), memory.host_total_and_swap()
    counts = {
        "ppo.num_envs": ppo.num_envs,
        "eval.num_envs": config.eval.num_envs,
        "env.reset_pool_size": config.env.reset_pool_size,
    }
    for key, count in counts.items():
        needed = states * count // ppo.num_envs
        if needed > host:
            raise ConfigError(
                f"{key}: the states of {count:,} environments take at least {readable(needed)} of the "
                f"{readable(host)} memory of this machine; at most {host * ppo.num_envs // states:,} could fit"
            )
