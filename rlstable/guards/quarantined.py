"""The env site for any functional environment: bad simulations are replaced, their samples masked and counted."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlstable.device.trees import PyTree
from rlstable.guards.base import Guard, GuardState, select
from rlstable.guards.env import EnvContext, EnvParts, Quarantine, parts_of

Step = Callable[[PyTree, jax.Array], PyTree]  # from batched states and actions [B, A] to batched states
Reset = Callable[[jax.Array], PyTree]  # from keys [B] to batched states


def quarantined(
    step: Step,
    reset: Reset,
    *,
    guard: Guard = Quarantine(),  # noqa: B008  a frozen value
    parts: Callable[[PyTree], EnvParts] = parts_of,
) -> Callable[[PyTree, jax.Array, jax.Array, GuardState], tuple[PyTree, jax.Array, GuardState]]:
    """A step `(state, action, key, guard_state) -> (state, valid, guard_state)` of batched environments.

    An environment whose state is bad is replaced by one of `reset`, which runs only in a step with a bad environment,
    and `valid`, bool `[B]`, is False for it. Leave these samples out of losses and statistics with `jnp.where`, never
    with a product, and cut returns there as at a truncation. The first guard state is `guard.init()`, and its `trips`
    count bad environments by `guard.causes`.

    Args:
        step: Batched step, such as `jax.vmap(env.step)`.
        reset: Batched reset, such as `jax.vmap(env.reset)`.
        guard: The limits; by default every float must be finite.
        parts: Takes a batched state apart; the default knows the states of Brax and Playground.
    """

    def guarded_step(
        state: PyTree, action: jax.Array, key: jax.Array, guard_state: GuardState
    ) -> tuple[PyTree, jax.Array, GuardState]:
        stepped = step(state, action)
        found = parts(stepped)
        alive = jnp.ones(jnp.shape(found.reward), bool)
        verdict = guard.apply(EnvContext(found, action, alive), guard_state)
        ok = jnp.asarray(verdict.ok)

        def replaced() -> PyTree:
            fresh = jax.tree.map(
                lambda x, like: jnp.asarray(x, like.dtype), reset(jax.random.split(key, len(ok))), stepped
            )
            return select(ok, stepped, fresh)

        return jax.lax.cond(jnp.all(ok), lambda: stepped, replaced), ok, verdict.state

    return guarded_step
