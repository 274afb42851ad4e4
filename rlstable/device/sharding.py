"""Data parallelism over devices, along one mesh axis `data`.

Each device keeps its environments. Only gradients, statistics and counters are reduced over devices, with the functions
of this file, so that every device computes the same verdicts. `check_vma` must stay off: with `check_vma`,
differentiation already sums over devices, and an explicit mean makes the gradient too large by the number of devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlstable.device.trees import PyTree

AXIS = "data"
REPLICATED = PartitionSpec()
SPLIT = PartitionSpec(AXIS)


def over_devices(
    function: Callable[..., PyTree], mesh: Mesh, in_specs: PyTree, out_specs: PyTree, donate: tuple[int, ...] = ()
) -> jax.stages.Wrapped:
    """Jits `function` to run on every device of the mesh, each with its shard of the arguments."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=donate)


def place(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Puts arrays on devices with the sharding of a program's results, so that nothing compiles twice.

    Each leaf is copied, because a buffer can be donated only once. Weak types become strong. Specs are a prefix.
    """
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)

    def put(sharding: NamedSharding, subtree: PyTree) -> PyTree:
        # `device_put`, because a compiled copy would need one program per shape.
        return jax.tree.map(lambda x: _put(_strong(x), _of(x, sharding)), subtree)

    with jax.enable_x64(True):  # otherwise float64 would silently become float32
        return jax.tree.map(put, shardings, tree, is_leaf=lambda x: isinstance(x, NamedSharding))


def _put(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """A copy of an array on devices. If other processes have some of the devices, each process puts its own shards."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    if _is_key(x):
        return jax.random.wrap_key_data(_put(jax.random.key_data(x), sharding), impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.sharding.is_equivalent_to(sharding, x.ndim):
            return jax.device_put(x, sharding, may_alias=False)
        own = [(shard.device, shard.data) for shard in x.addressable_shards]
    else:
        # `device_put` would compare the values of all processes, leaf by leaf.
        whole = np.asarray(x)
        own = [(device, whole[part]) for device, part in sharding.addressable_devices_indices_map(x.shape).items()]
    shards = [jax.device_put(part, device, may_alias=False) for device, part in own]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, shards)


def _is_key(x: jax.Array) -> bool:
    return bool(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key))


def placeholders(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Shapes, dtypes and shardings of the arrays that `place` returns, for compiling before the arrays exist."""

    def describe(spec: PartitionSpec, subtree: PyTree) -> PyTree:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_of(x, sharding)), subtree)

    return jax.tree.map(describe, specs, tree, is_leaf=_is_spec)


def fetch(tree: PyTree) -> PyTree:
    """Copies arrays to the host. On a CPU nothing is copied, and `jax.device_get` would take four times as long."""
    return jax.tree.map(np.asarray, tree) if jax.default_backend() == "cpu" else jax.device_get(tree)


def gathered(tree: PyTree) -> PyTree:
    """The tree with whole arrays, where an array is split over processes: in every process, and on the host.

    All processes must call it. In a process that trains alone it returns the tree itself.
    """
    leaves, structure = jax.tree.flatten(tree)
    split = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array) and not x.is_fully_addressable]
    split = [i for i in split if not leaves[i].is_fully_replicated]
    if split:
        with jax.enable_x64(True):  # otherwise float64 would silently become float32
            whole = _gathering(leaves[split[0]].sharding.mesh)([leaves[i] for i in split])
        for i, x in zip(split, whole, strict=True):
            leaves[i] = x.addressable_data(0) if _is_key(x) else np.asarray(x.addressable_data(0))
    return jax.tree.unflatten(structure, leaves)


@functools.cache
def _gathering(mesh: Mesh) -> jax.stages.Wrapped:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, REPLICATED))


def copy_arrays(tree: PyTree) -> PyTree:
    with jax.enable_x64(True):  # otherwise float64 would silently become float32
        return jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), tree)


def _strong(x: PyTree) -> PyTree:
    """The array with a strong type. Python numbers and some JAX results have a weak type."""
    return np.asarray(x) if getattr(x, "weak_type", not hasattr(x, "dtype")) else x


def _of(x: jax.Array, sharding: NamedSharding) -> NamedSharding:
    """The sharding of a leaf. Programs return leaves without elements, which MuJoCo has, as replicated."""
    return sharding if math.prod(x.shape) else NamedSharding(sharding.mesh, REPLICATED)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def device_count() -> int:
    """Number of devices on the axis, inside `over_devices`; 1 elsewhere."""
    try:
        return jax.lax.axis_size(AXIS)
    except NameError:  # outside of any `shard_map` with this axis
        return 1


def device_key(key: jax.Array) -> jax.Array:
    """A random key for this device; on a single device the key itself."""
    return key if device_count() == 1 else jax.random.fold_in(key, jax.lax.axis_index(AXIS))


def mean(tree: PyTree) -> PyTree:
    return _across(jax.lax.pmean, tree)


def total(tree: PyTree) -> PyTree:
    return _across(jax.lax.psum, tree)


def minimum(tree: PyTree) -> PyTree:
    return _across(jax.lax.pmin, tree)


def maximum(tree: PyTree) -> PyTree:
    return _across(jax.lax.pmax, tree)


def _across(reduce: Callable[[PyTree, str], PyTree], tree: PyTree) -> PyTree:
    """Reduces over devices. Skips a single device, where XLA would keep the reduction and its copies."""
    return tree if device_count() == 1 else reduce(tree, AXIS)


def first_device(tree: PyTree) -> PyTree:
    """Replicated arrays on the first device of this process; copied there if another device has them."""
    return jax.device_put(jax.tree.map(lambda x: x.addressable_data(0), tree), jax.local_devices()[0])
