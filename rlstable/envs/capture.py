"""The first bad simulation of every device, caught inside the compiled program before the quarantine replaces it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.packed import PackedRows
from rlstable.device.transforms import apply_if
from rlstable.guards.base import Guard, GuardState
from rlstable.guards.env import EnvContext, Quarantine, physics
from rlstable.ppo.state import Slot

# What a step of MuJoCo starts from (its mjSTATE_INTEGRATION), and Brax's coordinates, of which rewards are made. The
# rest of the physics is computed again; to keep it would cost a copy in every step, bad or not.
_INTEGRATION_STATE = (
    "time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos",
    "mocap_quat", "userdata", "q", "qd", "x", "xd",
)  # fmt: skip
_STEP_RESULT = ("qacc", *_INTEGRATION_STATE)


class StepRecord(NamedTuple):
    """One environment step of every environment of this device.

    Attributes:
        before: The state that `env.step` took, `[B]`.
        action: What the policy asked for, `[B, A]`.
        after: What `env.step` gave back, before anything is replaced.
        causes: bool `[causes, B]`, as `cause_names` names them.
        key: The random key of the step, from which its action's noise and its draws from the pool come.
    """

    before: Any
    action: jax.Array
    after: Any
    causes: jax.Array
    key: jax.Array


def cause_names(guards: Mapping[str, Guard]) -> list[str]:
    """Causes in the order of a slot's flags, `guard/cause` each."""
    return [f"{name}/{cause}" for name, guard in guards.items() for cause in guard.causes]


def flags(
    guards: Mapping[str, Guard], ctx: EnvContext, old: Mapping[str, GuardState], new: Mapping[str, GuardState]
) -> jax.Array:
    """Why environments are bad, bool `[causes, B]`.

    Of the quarantine all that applies, in the terms that its verdict is computed in already. Another guard has but its
    trips: they are said of every environment of the step.

    Args:
        guards: The env site's, by name.
        ctx: What they judged.
        old: Their states before.
        new: Their states after.
    """

    def of(name: str, guard: Guard) -> jax.Array:
        if isinstance(guard, Quarantine):
            return ~guard.fine(ctx)
        tripped = new[name].trips > old[name].trips
        return jnp.broadcast_to(tripped[:, None], (*tripped.shape, *ctx.alive.shape))

    return jnp.concatenate([of(name, guard) for name, guard in guards.items()])


def empty(guards: Mapping[str, Guard], state: Any, action_size: int, devices: int) -> Slot:
    """A slot per device that nothing is in, on the host.

    Args:
        guards: The env site's, by name.
        state: What `env.step` takes, `[B]`; only its shapes are looked at.
        action_size: Elements of an action.
        devices: How many slots.
    """

    def record(state: Any, action: jax.Array, key: jax.Array) -> Any:
        causes = jnp.zeros((len(cause_names(guards)), *action.shape[:1]), bool)
        return _record(StepRecord(state, action, state, causes, key), jnp.int32(0), jnp.int32(0))

    count = state.reward.shape[0]
    action, key = jax.ShapeDtypeStruct((count, action_size), jnp.float32), jax.eval_shape(jax.random.PRNGKey, 0)
    with jax.enable_x64(True):  # so that float64 stays what it is; nothing here would be widened
        shapes = jax.eval_shape(record, state, action, key)
    blank = jax.tree.map(lambda x: np.zeros((devices, *x.shape), x.dtype), shapes)
    return Slot(np.zeros(devices, bool), np.zeros(devices, np.int32), PackedRows.of(blank))


def catch(slot: Slot, seen: StepRecord, bad: jax.Array) -> Slot:
    """Counts the step, and keeps the first bad environment of it if the slot is empty.

    Args:
        slot: This device's, `[1]`.
        seen: The step.
        bad: bool `[B]`, which environments went bad in it.
    """

    def fill(slot: Slot) -> Slot:
        record = _record(seen, jnp.argmax(bad).astype(jnp.int32), slot.clock[0])
        return Slot(jnp.ones_like(slot.taken), slot.clock, PackedRows.of(jax.tree.map(lambda x: x[None], record)))

    slot = apply_if(jnp.any(bad) & ~slot.taken[0], fill, slot)
    return dataclasses.replace(slot, clock=slot.clock + 1)


def _record(seen: StepRecord, index: jax.Array, clock: jax.Array) -> dict[str, Any]:
    """Stored arrays of one environment; typed random keys as their integers."""
    kept = {
        "before": _select_physics(_INTEGRATION_STATE, seen.before),
        "action": seen.action,
        "after": _select_physics(_STEP_RESULT, seen.after),
        "causes": seen.causes.T,
    }
    return _take(kept, index) | {"environment": index, "clock": clock, "key": _storable(seen.key)}


def history_row(seen: StepRecord, index: jax.Array | int) -> dict[str, Any]:
    """Start and reward of one environment's step, of which a history consists."""
    after = seen.after
    kept = {"before": _select_physics(_INTEGRATION_STATE, seen.before), "action": seen.action}
    return _take(kept | {"reward": after.reward, "done": after.done}, index)


def _take(tree: Any, index: jax.Array | int) -> Any:
    return jax.tree.map(lambda x: _storable(x[index]), tree)


def _select_physics(names: tuple[str, ...], state: Any) -> Any:
    """The state with these parts of its physics; with all of it where it is not MuJoCo's."""
    whole = physics(state)
    # MuJoCo's alone has a solver that starts from its last solution.
    if getattr(whole, "qacc_warmstart", None) is None:
        return state
    field = "pipeline_state" if hasattr(state, "pipeline_state") else "data"
    parts = {name: getattr(whole, name) for name in names if getattr(whole, name, None) is not None}
    return state.replace(**{field: parts})


def _storable(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
