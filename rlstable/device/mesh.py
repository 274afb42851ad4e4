"""The devices that a run trains on."""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.sharding import Mesh

from rlstable.config import ConfigError
from rlstable.config.extras import install
from rlstable.device.sharding import AXIS


def make_mesh(count: int | None = None) -> Mesh:
    """The mesh of the first `count` devices, all of all processes if None; a `ConfigError` if JAX finds too few."""
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError):
        platform = os.environ.get("JAX_PLATFORMS")
        if not platform:
            raise
        raise ConfigError(
            f"JAX_PLATFORMS: JAX finds no device for {platform!r} on this machine; unset it to train on the devices "
            f"that JAX finds, or install JAX for it, such as {install('cuda12')}"
        ) from None
    if count is not None and count > len(devices):
        raise ConfigError(
            f"devices: {count} requested, but only {len(devices)} {devices[0].platform} available; "
            f"{len(devices)} would fit"
        )
    return Mesh(np.array(devices[:count]), (AXIS,))


def device_kind(mesh: Mesh) -> str:
    """The vendor's name of the device type."""
    return str(mesh.devices.flat[0].device_kind)
