"""Devices: one `data` axis, and the only file that names them.

Environments live on their device; only gradients, statistics and counters cross, by the explicit reductions here, so
that a verdict is the same everywhere. `check_vma` stays off: with it on, differentiation sums over devices already and
an explicit mean gives a gradient that is too large by the number of devices, equally wrong on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstable.config import ConfigError

AXIS = "data"
REPLICATED = PartitionSpec()
SPLIT = PartitionSpec(AXIS)


def make_mesh(count: int | None = None) -> Mesh:
    """The mesh of `count` devices, all of them when null.

    Raises:
        ConfigError: More devices are asked for than there are.
    """
    devices = jax.devices()
    if count is not None and count > len(devices):
        raise ConfigError(
            f"devices: {count} asked for, {len(devices)} {devices[0].platform} there; {len(devices)} would fit"
        )
    return Mesh(np.array(devices[:count]), (AXIS,))


def device_kind(mesh: Mesh) -> str:
    """The kind of device, as its maker calls it."""
    return str(mesh.devices.flat[0].device_kind)


def over_devices(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Any:
    """Compiles `function` to run on every device of the mesh with its share of the split arguments."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def place(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Puts arrays where a compiled program will leave them, so that nothing compiles twice.

    Args:
        tree: Any pytree of arrays. Each leaf is copied, since a donated buffer may appear once only, and weak
            types become strong.
        mesh: The devices.
        specs: Partition specs, a prefix of `tree`.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)

    def put(sharding: NamedSharding, subtree: Any) -> Any:
        # No copy by a program: every shape there is would compile one.
        return jax.tree.map(lambda x: jax.device_put(_strong(x), _of(x, sharding), may_alias=False), subtree)

    with jax.enable_x64(True):  # or float64 would become float32 in silence
        return jax.tree.map(put, shardings, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def placeholders(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """Shapes, types and places of what `place` would put there, to compile for without having the arrays.

    Args:
        tree: Any pytree of arrays or of their shapes.
        mesh: The devices.
        specs: Partition specs, a prefix of `tree`.
    """

    def lay(spec: PartitionSpec, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_of(x, sharding)), subtree)

    return jax.tree.map(lay, specs, tree, is_leaf=_is_spec)


def fetch(tree: Any) -> Any:
    """Copies arrays to the host, without a copy on a CPU, where `jax.device_get` takes four times as long."""
    return jax.tree.map(np.asarray, tree) if jax.default_backend() == "cpu" else jax.device_get(tree)


def copy_arrays(tree: Any) -> Any:
    """Copies of arrays on the same devices."""
    with jax.enable_x64(True):  # or physics in float64 would be narrowed
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)


def _strong(x: Any) -> Any:
    """An array of a strong type; Python numbers and some JAX results have a weak type."""
    return np.asarray(x) if getattr(x, "weak_type", not hasattr(x, "dtype")) else x


def _of(x: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf. Leaves without elements (MuJoCo has some) come out of a program replicated."""
    return sharding if math.prod(x.shape) else NamedSharding(sharding.mesh, REPLICATED)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def device_count() -> int:
    """Devices on the axis, inside `over_devices`."""
    return jax.lax.axis_size(AXIS)


def device_key(key: jax.Array) -> jax.Array:
    """A random key of this device's own; on a single device the key itself."""
    return key if device_count() == 1 else jax.random.fold_in(key, jax.lax.axis_index(AXIS))


def mean(tree: Any) -> Any:
    """The mean over devices of every leaf."""
    return _across(jax.lax.pmean, tree)


def total(tree: Any) -> Any:
    """The sum over devices of every leaf."""
    return _across(jax.lax.psum, tree)


def minimum(tree: Any) -> Any:
    """The minimum over devices of every leaf."""
    return _across(jax.lax.pmin, tree)


def maximum(tree: Any) -> Any:
    """The maximum over devices of every leaf."""
    return _across(jax.lax.pmax, tree)


def _across(reduce: Callable[[Any, str], Any], tree: Any) -> Any:
    """Nothing on a single device: XLA keeps a reduction over one participant, with its copies and its rendezvous."""
    return tree if device_count() == 1 else reduce(tree, AXIS)


def first_device(tree: Any) -> Any:
    """The first device's copy of replicated arrays."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
