"""Brax's own PPO trainer as published; imports nothing but Brax and JAX, as the rivals' scripts must."""

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def train(env: Any, settings: Mapping[str, Any], **more: Any) -> None:
    """Trains with the settings of `brax_ppo.py`. JAX has back one function that newer versions dropped."""
    known = inspect.signature(ppo.train).parameters
    arguments = {name: value for name, value in settings["train"].items() if name in known} | more
    factory = functools.partial(ppo_networks.make_ppo_networks, **settings["networks"])
    with with_device_put_replicated():
        ppo.train(env, network_factory=factory, **arguments)


def with_device_put_replicated() -> contextlib.AbstractContextManager[Any]:
    if hasattr(jax, "device_put_replicated"):
        return contextlib.nullcontext()
    return mock.patch.object(jax, "device_put_replicated", device_put_replicated, create=True)


def device_put_replicated(tree: Any, devices: Sequence[jax.Device]) -> Any:
    """Copies every leaf to each device, on a leading axis, as the function did that JAX dropped."""
    sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
    return jax.tree.map(lambda leaf: jax.device_put(jnp.stack([jnp.asarray(leaf)] * len(devices)), sharding), tree)
