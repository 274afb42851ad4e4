"""Guards: small value objects that check one kind of value at one named site.

A guard's fields are its configuration; its state is passed in and out. The sites are `env`, `batch`, `update` and
`state`. Each site runs its guards with one `fold`. If a guard rejects a value, `select` keeps the old value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree

GREATEST_NORM = 1e19  # the square, 1e38, is the largest power of ten in float32


class GuardState(NamedTuple):
    """State of a guard.

    Attributes:
        trips: int32 `[causes]`, trips by cause since the iteration started. The end of the iteration adds them to the
            run's 64-bit counters and resets them.
        memory: Values that the guard keeps between calls, never built from rejected samples.
    """

    trips: jax.Array
    memory: PyTree = ()


class Verdict(NamedTuple):
    """Result of a guard.

    Attributes:
        value: The checked value, repaired or unchanged.
        ok: False where the value is rejected; `[B]` or `[T, B]` at sites that check samples, else a scalar.
    """

    value: PyTree
    ok: jax.Array | bool
    state: PyTree


class Guard(Protocol):
    """Base and protocol of all guards. `ctx` is the context of the site, and `ctx.value` is the value to check.

    Attributes:
        causes: Names of the causes of a trip. If several causes apply, the first one is counted.
    """

    causes: ClassVar[tuple[str, ...]]

    def init(self) -> GuardState:
        """The initial state: no trips, no memory."""
        return GuardState(no_trips(self.causes))

    def apply(self, ctx: Any, state: GuardState) -> Verdict:
        """Checks `ctx.value`."""


def fold(guards: Mapping[str, Guard], ctx: Any, states: Mapping[str, GuardState]) -> Verdict:
    """Runs the guards of a site one after another, each on the value that the previous guard returned.

    `ok` is True where every guard is ok. Without guards, it is a Python `True`, and JAX traces nothing.
    """
    ok: jax.Array | bool = True
    new_states = dict(states)
    for name, guard in guards.items():
        verdict = guard.apply(ctx, states[name])
        ctx = ctx._replace(value=verdict.value)
        ok = both(ok, verdict.ok)
        new_states[name] = verdict.state
    return Verdict(ctx.value, ok, new_states)


def both(ok: jax.Array | bool, also: jax.Array | bool) -> jax.Array | bool:
    """`ok & also`, where a Python `True` means that nothing was checked, and traces nothing."""
    if ok is True or also is True:
        return also if ok is True else ok
    return ok & also


def initial_states(guards: Mapping[str, Guard], memories: Mapping[str, PyTree]) -> dict[str, GuardState]:
    """The states of guards at the start of an iteration, from their memories of the previous iteration."""
    return {name: GuardState(no_trips(guard.causes), memories[name]) for name, guard in guards.items()}


def select(ok: jax.Array | bool, accepted: PyTree, previous: PyTree) -> PyTree:
    """`accepted` where ok, else `previous`. Uses `jnp.where`, because in a product `0 * nan` is `nan`.

    `ok` is a scalar, or an array over the leading axes of every leaf. A Python `True` traces nothing.
    """
    if ok is True:
        return accepted

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(ok, jnp.shape(ok) + (1,) * (jnp.ndim(new) - jnp.ndim(ok))), new, old)

    return jax.tree.map(choose, accepted, previous)


def no_trips(causes: tuple[str, ...]) -> jax.Array:
    return jnp.zeros(len(causes), jnp.int32)


def count_first(bad: jax.Array) -> jax.Array:
    """Counts bad samples, bool `[causes, ...]`, by their first cause, so that each sample counts once."""
    causes = jnp.arange(bad.shape[0]).reshape(-1, *(1,) * (bad.ndim - 1))
    first = jnp.argmax(bad, axis=0, keepdims=True) == causes
    return jnp.sum(bad & first, axis=tuple(range(1, bad.ndim)), dtype=jnp.int32)


def all_finite(tree: PyTree, batch_dims: int = 0) -> jax.Array:
    """Whether every float in `tree` is finite, bool with the shape of the first `batch_dims` axes."""
    return _every(tree, batch_dims, jnp.isfinite)


def all_within(tree: PyTree, limit: float | None, batch_dims: int = 0) -> jax.Array:
    """Whether every float in `tree` has a magnitude of at most `limit`; never true of NaN. None: any finite float."""
    if limit is None:
        return all_finite(tree, batch_dims)
    # A limit above the dtype's maximum would become infinite and accept infinity.
    return _every(tree, batch_dims, lambda x: jnp.abs(x) <= min(limit, float(jnp.finfo(x.dtype).max)))


def norm_within(tree: PyTree, limit: float | None, batch_dims: int = 0) -> jax.Array:
    """Whether the Euclidean norm of all floats in `tree` is at most `limit`; never true with NaN or infinity.

    For large trees: a sum of squares is faster than the comparisons of `all_within`. No norm above `GREATEST_NORM`
    passes a limit; a limit of None only requires finite floats.
    """
    if limit is None:
        return all_finite(tree, batch_dims)
    return _squared_norm(tree, batch_dims) <= min(limit, GREATEST_NORM) ** 2


def norm_of(tree: PyTree) -> jax.Array:
    """The Euclidean norm of all floats in `tree`, float32; infinite above 1.8e19, whose square is too large."""
    return jnp.sqrt(_squared_norm(tree, 0))


def _squared_norm(tree: PyTree, batch_dims: int) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    # Arrays of one shape are added first, so one kernel reduces all of them.
    squares: dict[tuple[int, ...], jax.Array] = {}
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size:
            square = jnp.square(leaf.astype(jnp.float32))
            squares[leaf.shape] = squares[leaf.shape] + square if leaf.shape in squares else square
    total = jnp.zeros(leaves[0].shape[:batch_dims] if leaves else ())
    for square in squares.values():
        total += jnp.sum(square, axis=tuple(range(batch_dims, square.ndim)))
    return total


def _every(tree: PyTree, batch_dims: int, predicate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    leaves = jax.tree.leaves(tree)
    every: jax.Array | bool = True
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            every = both(every, jnp.all(predicate(leaf), axis=tuple(range(batch_dims, leaf.ndim))))
    return jnp.ones(leaves[0].shape[:batch_dims] if leaves else (), bool) if isinstance(every, bool) else every
