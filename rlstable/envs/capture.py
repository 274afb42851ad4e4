"""The first bad simulation of every device, caught inside the compiled program before the quarantine replaces it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.envs.rarely import apply_if
from rlstable.guards.base import Guard, GuardState
from rlstable.guards.env import EnvContext, Quarantine
from rlstable.packed import Rows
from rlstable.ppo.state import Slot


class Seen(NamedTuple):
    """One environment step of every environment of this device.

    Attributes:
        before: The state that `env.step` took, `[B]`.
        action: What the policy asked for, `[B, A]`.
        after: What `env.step` gave back, before anything is replaced.
        alive: bool `[B]`, False where an earlier repeat of the same action was bad already.
        tripped: int32 `[causes]` by guard, over all environments of this step.
        key: The random key of the step, from which its action's noise and its draws from the pool come.
    """

    before: Any
    action: jax.Array
    after: Any
    alive: jax.Array
    tripped: Mapping[str, jax.Array]
    key: jax.Array


def causes_of(guards: Mapping[str, Guard]) -> list[str]:
    """What `Slot` knows of why an environment is bad, `guard/cause` each, in the order of its flags."""
    return [f"{name}/{cause}" for name, guard in guards.items() for cause in guard.causes]


def empty(guards: Mapping[str, Guard], state: Any, action_size: int, devices: int) -> Slot:
    """A slot per device that nothing is in, on the host.

    Args:
        guards: The env site's, by name.
        state: What `env.step` takes, `[B]`; only its shapes are looked at.
        action_size: Elements of an action.
        devices: How many slots.
    """

    def record(state: Any, action: jax.Array, key: jax.Array) -> Any:
        tripped = {name: guard.init().trips for name, guard in guards.items()}
        seen = Seen(state, action, state, jnp.ones(action.shape[:1], bool), tripped, key)
        return _record(guards, seen, jnp.int32(0), jnp.int32(0))

    count = state.reward.shape[0]
    shapes = jax.eval_shape(
        record, state, jax.ShapeDtypeStruct((count, action_size), jnp.float32), jax.eval_shape(jax.random.PRNGKey, 0)
    )
    blank = jax.tree.map(lambda x: np.zeros((devices, *x.shape), x.dtype), shapes)
    return Slot(np.zeros(devices, bool), np.zeros(devices, np.int32), Rows.of(blank))


def catch(slot: Slot, guards: Mapping[str, Guard], seen: Seen, bad: jax.Array) -> Slot:
    """Counts the step, and keeps the first bad environment of it if the slot is empty.

    Args:
        slot: This device's, `[1]`.
        guards: The env site's, by name.
        seen: The step.
        bad: bool `[B]`, which environments went bad in it.
    """

    def fill(slot: Slot) -> Slot:
        record = _record(guards, seen, jnp.argmax(bad).astype(jnp.int32), slot.clock[0])
        return Slot(jnp.ones_like(slot.taken), slot.clock, Rows.of(jax.tree.map(lambda x: x[None], record)))

    slot = apply_if(jnp.any(bad) & ~slot.taken[0], fill, slot)
    return dataclasses.replace(slot, clock=slot.clock + 1)


def _record(guards: Mapping[str, Guard], seen: Seen, index: jax.Array, clock: jax.Array) -> dict[str, Any]:
    """What is kept of one environment; typed random keys as the integers they are made of."""
    before, action, after = jax.tree.map(lambda x: x[index], (seen.before, seen.action, seen.after))
    alone = jax.tree.map(lambda x: x[None], EnvContext(after, action, seen.alive[index]))
    return jax.tree.map(
        _plain,
        {
            "before": before,
            "action": action,
            "after": after,
            "causes": jnp.concatenate([_causes(guard, alone, seen.tripped[name]) for name, guard in guards.items()]),
            "environment": index,
            "clock": clock,
            "key": seen.key,
        },
    )


def _causes(guard: Guard, alone: EnvContext, tripped: jax.Array) -> jax.Array:
    """Of the quarantine this environment's own. Another guard may speak to other devices, which are not in the loop."""
    return ~guard.fine(alone)[:, 0] if isinstance(guard, Quarantine) else tripped > 0


def _plain(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def trips_between(old: Mapping[str, GuardState], new: Mapping[str, GuardState]) -> dict[str, jax.Array]:
    """Trips of one step by guard, int32 `[causes]` each."""
    return {name: state.trips - old[name].trips for name, state in new.items()}
