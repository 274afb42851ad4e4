"""Several seeds on several devices: one program on all devices, and equally many whole seeds on each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from rlstable.config.schema import ConfigError
from rlstable.device import sharding
from rlstable.device.trees import PyTree

_AXIS = "seeds"


def device_count_for(seeds: int, available: int, requested: int | None) -> int:
    """Number of devices to train on: the requested one, or as many as are available and divide the number of seeds."""
    usable = [count for count in range(1, available + 1) if seeds % count == 0]
    if requested is None:
        return usable[-1]
    if requested not in usable:
        choices = ", ".join(map(str, usable))
        raise ConfigError(
            f"devices: {requested} devices cannot train equally many of {seeds} seeds; allowed here: {choices}, or "
            "null for the most that divide the seeds"
        )
    return requested


class SeedDevices:
    """Devices that train several seeds together; the seeds of a device are consecutive.

    No array is split over devices. The program takes one array for the k-th seeds of all devices: JAX counts it as
    replicated, and its copies differ. So nothing else may use these arrays. In `mesh` the axis of data has length 1.
    """

    def __init__(self, count: int):
        devices = np.array(jax.devices()[:count])
        self.mesh = Mesh(devices[:, None], (_AXIS, sharding.AXIS))
        self._devices = list(devices)
        self._sharding = NamedSharding(self.mesh, sharding.REPLICATED)

    @property
    def count(self) -> int:
        return len(self._devices)

    def program(self, function: Callable[[PyTree], PyTree]) -> jax.stages.Wrapped:
        """Jits a function of the tuple of a device's states, to run on every device; the states are donated."""
        return sharding.over_devices(function, self.mesh, sharding.REPLICATED, sharding.REPLICATED, donate=(0,))

    def placeholders(self, states: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """Shapes and shardings of the result of `joined`, from the states of all seeds or their shapes."""

        def placeholder(x: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding)

        return tuple(jax.tree.map(placeholder, state) for state in states[: len(states) // self.count])

    def joined(self, states: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The arguments of a program, from the states of all seeds; states on another device are copied."""
        each = len(states) // self.count

        def join(*leaves: jax.Array) -> jax.Array:
            own = [_on(leaf, device) for leaf, device in zip(leaves, self._devices, strict=True)]
            return jax.make_array_from_single_device_arrays(leaves[0].shape, self._sharding, own)

        return tuple(jax.tree.map(join, *states[first::each]) for first in range(each))

    def divided(self, results: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The results of a program for each seed, in the order of the seeds."""
        # Not `addressable_data`, which returns the first copy of every array that counts as replicated.
        return tuple(
            jax.tree.map(lambda x, device=device: x.addressable_shards[device].data, result)
            for device in range(self.count)
            for result in results
        )


def _on(x: jax.Array, device: jax.Device) -> jax.Array:
    """The array on a device. `device_put` takes five times as long for an array that is there already.

    The array is donated: else the first device would keep the first states of all seeds. A CPU ignores that.
    """
    return x if isinstance(x, jax.Array) and x.devices() == {device} else jax.device_put(x, device, donate=True)
