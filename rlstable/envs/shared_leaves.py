"""Finds the leaves of a batched state that all environments share, and attributes bad contacts to environments."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.config.schema import ConfigError
from rlstable.device import compatibility
from rlstable.device.shared import Shared
from rlstable.device.trees import EnvState
from rlstable.guards.env import physics

_CONTACT = "contact__"  # prefix of MJX-Warp's contact arrays, `[naconmax, ...]`


def mark(state: EnvState, reset: Callable[[jax.Array], EnvState], keys: jax.Array) -> EnvState:
    """Marks the shared leaves of `state = jax.vmap(reset)(keys)`: those with the same shape at two batch sizes.

    Raises `ConfigError` if a leaf is neither shared nor has one row per environment.
    """
    if not _may_share(state):
        return state
    count = keys.shape[0]
    more = jax.ShapeDtypeStruct((count + 1, *keys.shape[1:]), keys.dtype)
    # As lists of leaves, because classes of states may hold the batch size as a constant.
    others = iter(jax.tree.leaves(jax.eval_shape(jax.vmap(reset), more)))

    def mark_leaf(path: jax.tree_util.KeyPath, x: jax.Array) -> Shared | jax.Array:
        other = next(others).shape
        if other == x.shape:
            return Shared(x[None])
        if (x.shape[:1], other[:1]) == ((count,), (count + 1,)) and x.shape[1:] == other[1:]:
            return x
        raise ConfigError(
            f"env.name: reset returns {jax.tree_util.keystr(path).lstrip('.')} with shape {x.shape} for {count} "
            f"environments and {other} for {count + 1}; it must have one row per environment, or the same shape"
        )

    return jax.tree_util.tree_map_with_path(mark_leaf, state)


def contact_norms(state: EnvState) -> jax.Array | None:
    """Largest norm of a contact's numbers by environment, `[B]`; infinite if a number is not finite.

    Contacts belong to the environment in `contact.worldid`. Entries from `nacon` on are left from earlier steps. None
    if the physics has no shared contacts.
    """
    data = compatibility.mjx_arrays(physics(state))
    world, count = (getattr(data, name, None) for name in (f"{_CONTACT}worldid", "nacon"))
    if not isinstance(world, Shared) or not isinstance(count, Shared) or not world.value.size:
        return None
    world_id = world.value[0]
    squares = jnp.zeros(world_id.shape)
    for name, leaf in sorted(vars(data).items()):
        x = leaf.value[0] if name.startswith(_CONTACT) and isinstance(leaf, Shared) else None
        if x is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.shape[:1] == world_id.shape:
            squares += jnp.sum(jnp.square(x).reshape(len(world_id), -1), axis=1)
    active = jnp.arange(len(world_id)) < count.value.reshape(())
    # The maximum of NaN and a number depends on the device.
    norms = jnp.where(jnp.isnan(squares), jnp.inf, jnp.sqrt(squares))
    return jnp.zeros(state.reward.shape).at[world_id].max(jnp.where(active, norms, 0.0), mode="drop")


def _may_share(state: EnvState) -> bool:
    """Whether `jax.vmap` keeps some leaf without a batch axis, which only classes with a rule of their own can do.

    Constants show this in milliseconds. A second trace of MuJoCo's reset would take seconds.
    """
    constants = lambda _: jax.tree.map(lambda _: jnp.zeros(()), state)  # noqa: E731
    batches = (jax.ShapeDtypeStruct((count,), jnp.float32) for count in (2, 3))
    shapes = (jax.eval_shape(jax.vmap(constants), batch) for batch in batches)
    two, three = map(jax.tree.leaves, shapes)
    return any(a.shape == b.shape for a, b in zip(two, three, strict=True))
