"""Guards: frozen values that check one kind of number at one named site.

A guard owns no state and knows no devices; its fields are its configuration. Sites are `env`, `batch`, `update` and
`state`, and each is one `fold` over the guards configured there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rlstable.config.schema import ConfigError
from rlstable.device.trees import PyTree

GREATEST_NORM = 1e19  # its square is the greatest power of ten that float32 holds


class GuardState(NamedTuple):
    """State of a guard.

    Attributes:
        trips: int32 `[causes]`, firings by cause since the iteration began; counted wide at its end, and not kept.
        memory: Whatever else the guard keeps between calls; never built from rejected samples.
    """

    trips: jax.Array
    memory: PyTree = ()


class Verdict(NamedTuple):
    """Answer of a guard.

    Attributes:
        value: The judged value, repaired or untouched.
        ok: False where the caller keeps its old state: `[B]` or `[T, B]` at sites that judge samples, else a scalar.
        state: Counters and statistics.
    """

    value: PyTree
    ok: jax.Array | bool
    state: PyTree


class Guard(Protocol):
    """The contract. `ctx` is the small record of what the site can see; its `value` is what is judged."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Why it can trip; the first that applies is counted."""

    def init(self) -> GuardState:
        """The state before the first call."""

    def apply(self, ctx: Any, state: GuardState) -> Verdict:
        """Judges `ctx.value`."""


SITES = ("env", "batch", "update", "state")
MoreGuards = Mapping[str, Mapping[str, Any]]


def check_more(more: MoreGuards, taken: Collection[str]) -> None:
    """Checks guards that are to stand beside the configured ones.

    Args:
        more: By site and name.
        taken: Names of the configured ones.

    Raises:
        ConfigError: No such site, or a name that is taken, be it by another one of these.
    """
    seen = set(taken)
    for site, guards in more.items():
        if site not in SITES:
            raise ConfigError(f"more_guards: there is no site {site!r}; there are {', '.join(SITES)}")
        for name in guards:
            if name in seen:
                raise ConfigError(f"more_guards: {name!r} is the name of another guard; choose a different one")
            seen.add(name)


def fold(guards: Mapping[str, Guard], ctx: Any, states: Mapping[str, GuardState]) -> Verdict:
    """Asks every guard of a site in turn; each sees what the one before made of the value.

    Without guards the verdict is the untouched value and a Python `True`, so that nothing is traced.

    Returns:
        The last value, ok only where all are, and the new states by name.
    """
    ok: jax.Array | bool = True
    new_states = dict(states)
    for name, guard in guards.items():
        verdict = guard.apply(ctx, states[name])
        ctx = ctx._replace(value=verdict.value)
        ok = verdict.ok if ok is True else ok & verdict.ok
        new_states[name] = verdict.state
    return Verdict(ctx.value, ok, new_states)


def initial_states(guards: Mapping[str, Guard], memories: Mapping[str, PyTree]) -> dict[str, GuardState]:
    """The states of guards at the start of an iteration, from what they remember of the one before."""
    return {name: GuardState(no_trips(guard.causes), memories[name]) for name, guard in guards.items()}


def select(ok: jax.Array | bool, accepted: PyTree, kept: PyTree) -> PyTree:
    """`accepted` where ok, else `kept`; a choice and never a product, since `0 * nan` is `nan`.

    Args:
        ok: Scalar, or leading axes of every leaf. A Python `True` traces nothing.
        accepted: Taken where ok.
        kept: Taken elsewhere, same structure.
    """
    if ok is True:
        return accepted

    def choose(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(ok, jnp.shape(ok) + (1,) * (jnp.ndim(new) - jnp.ndim(ok))), new, old)

    return jax.tree.map(choose, accepted, kept)


def no_trips(causes: tuple[str, ...]) -> jax.Array:
    """A zero count for every cause."""
    return jnp.zeros(len(causes), jnp.int32)


def count_first(bad: jax.Array) -> jax.Array:
    """Counts samples by the first cause that applies, so that the causes add up to the samples.

    Args:
        bad: bool `[causes, ...]`.

    Returns:
        int32 `[causes]`.
    """
    causes = jnp.arange(bad.shape[0]).reshape(-1, *(1,) * (bad.ndim - 1))
    first = jnp.argmax(bad, axis=0, keepdims=True) == causes
    return jnp.sum(bad & first, axis=tuple(range(1, bad.ndim)), dtype=jnp.int32)


def all_finite(tree: PyTree, batch_dims: int = 0) -> jax.Array:
    """Whether every float in `tree` is finite, per leading index.

    Args:
        tree: Any pytree; integer and boolean leaves are always finite.
        batch_dims: Leading axes that are kept.

    Returns:
        bool, of the shape of those axes.
    """
    return _every(tree, batch_dims, jnp.isfinite)


def all_within(tree: PyTree, limit: float | None, batch_dims: int = 0) -> jax.Array:
    """Whether every float in `tree` has at most `limit` as magnitude; NaN has not. None asks for finiteness alone."""
    if limit is None:
        return all_finite(tree, batch_dims)
    # A limit that the type does not hold would be infinite, and so let infinity through.
    return _every(tree, batch_dims, lambda x: jnp.abs(x) <= min(limit, float(jnp.finfo(x.dtype).max)))


def norm_within(tree: PyTree, limit: float | None, batch_dims: int = 0) -> jax.Array:
    """Whether the Euclidean norm of all floats in `tree` is at most `limit`; NaN and infinity never are.

    For large trees: a sum of squares is quicker than the comparisons of `all_within`. None asks for finiteness alone.

    Args:
        tree: Any pytree.
        limit: Whatever is beyond 1e19 counts as 1e19, whose square float32 still holds.
        batch_dims: Leading axes that are kept.

    Returns:
        bool, of the shape of those axes.
    """
    if limit is None:
        return all_finite(tree, batch_dims)
    leaves = jax.tree.leaves(tree)
    total = jnp.zeros(leaves[0].shape[:batch_dims] if leaves else ())
    for leaf in leaves:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            square = jnp.square(leaf.astype(jnp.float32))
            total += jnp.sum(square, axis=tuple(range(batch_dims, leaf.ndim)))
    return total <= min(limit, GREATEST_NORM) ** 2


def _every(tree: PyTree, batch_dims: int, holds: Any) -> jax.Array:
    verdict: jax.Array | None = None
    for leaf in jax.tree.leaves(tree):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            continue
        fine = jnp.all(holds(leaf), axis=tuple(range(batch_dims, leaf.ndim)))
        verdict = fine if verdict is None else verdict & fine
    if verdict is not None:
        return verdict
    leaves = jax.tree.leaves(tree)
    return jnp.ones(leaves[0].shape[:batch_dims] if leaves else (), bool)
