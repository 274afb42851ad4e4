"""Shared leaves of a batched environment state: arrays of all environments together, without a batch axis.

MJX-Warp keeps the contacts of all environments in one array. In a batched state such an array is a node `Shared`, so
every function can tell it from an array with one row per environment. A state without shared leaves has no such node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from rlstable.device.packed import concatenate
from rlstable.device.trees import PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
    """A shared leaf, one copy per device: `[devices, ...]`, inside a program on several devices `[1, ...]`."""

    value: PyTree


def has_shared(tree: PyTree) -> bool:
    return bool(shared_in(tree))


def without_shared(tree: PyTree) -> PyTree:
    """The tree with None in the place of shared leaves; every leaf has a batch axis."""
    return _map(lambda x: None, lambda x: x, tree) if has_shared(tree) else tree


def shared_in(tree: PyTree) -> list[Shared]:
    """The shared leaves of a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=_is) if isinstance(x, Shared)]


def with_shared_of(tree: PyTree, like: PyTree, shared: list[Shared] | None = None) -> PyTree:
    """A tree of `without_shared` with shared leaves again: `shared`, as from `shared_in`, or those of `like`."""
    if not has_shared(like):
        return tree
    own, new = iter(jax.tree.leaves(tree)), iter(shared_in(like) if shared is None else shared)
    return _map(lambda _: next(new), lambda _: next(own), like)


def unmarked(tree: PyTree) -> PyTree:
    """The batched tree as `jax.vmap` takes and returns it, with plain arrays as shared leaves."""
    return _map(lambda x: x.value[0], lambda x: x, tree) if has_shared(tree) else tree


def vmapped(step: Callable[..., PyTree], state: PyTree, *args: PyTree) -> PyTree:
    """Maps `step` over a batched state with shared leaves; equals `jax.vmap(step)(state, *args)` without any."""
    stepped = jax.vmap(step)(unmarked(state), *args)
    if not has_shared(state):
        return stepped
    leaves = iter(jax.tree.leaves(stepped))
    return _map(lambda _: Shared(next(leaves)[None]), lambda _: next(leaves), state)


def map_rows(function: Callable[..., PyTree], tree: PyTree, *others: PyTree) -> PyTree:
    """`jax.tree.map` over the leaves with a batch axis. Shared leaves are those of the first tree."""
    return jax.tree.map(lambda x, *ys: x if isinstance(x, Shared) else function(x, *ys), tree, *others, is_leaf=_is)


def row(tree: PyTree, index: jax.typing.ArrayLike) -> PyTree:
    """The state of one environment: a row of every leaf with a batch axis, and the whole shared leaves."""
    return _map(lambda x: x.value[0], lambda x: x[index], tree)


def for_devices(tree: PyTree, count: int) -> PyTree:
    """The tree with a copy of every shared leaf for each of `count` devices; also for shapes."""

    def copies(x: Shared) -> Shared:
        shape = (count, *x.value.shape[1:])
        if isinstance(x.value, jax.ShapeDtypeStruct):
            return Shared(jax.ShapeDtypeStruct(shape, x.value.dtype))
        return Shared(concatenate([x.value[:1]] * count))

    return _map(copies, lambda x: x, tree) if has_shared(tree) else tree


def _map(of_shared: Callable[[Shared], PyTree], of_own: Callable[[jax.Array], PyTree], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: of_shared(x) if isinstance(x, Shared) else of_own(x), tree, is_leaf=_is)


def _is(x: object) -> bool:
    return isinstance(x, Shared)
