"""Records the first bad environment of every device, inside the compiled program, before the quarantine resets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.packed import PackedRows
from rlstable.device.shared import row
from rlstable.device.transforms import select_if
from rlstable.device.trees import EnvState, PyTree
from rlstable.guards.base import Guard, GuardState
from rlstable.guards.env import EnvContext, Quarantine, physics, physics_field
from rlstable.ppo.state import Slot

# MuJoCo's integration state (mjSTATE_INTEGRATION), and Brax's coordinates, which rewards depend on. A replay computes
# the rest of the physics again: recording it would cost a copy in every step, even for healthy environments.
_INTEGRATION_STATE = (
    "time", "qpos", "qvel", "act", "qacc_warmstart", "ctrl", "qfrc_applied", "xfrc_applied", "eq_active", "mocap_pos",
    "mocap_quat", "userdata", "q", "qd", "x", "xd",
)  # fmt: skip
_STEP_RESULT = ("qacc", *_INTEGRATION_STATE)


class StepRecord(NamedTuple):
    """One environment step of every environment of this device."""

    before: EnvState  # argument of `env.step`, [B]
    action: jax.Array  # of the policy, [B, A]
    after: EnvState  # result of `env.step`, before any environment is reset
    causes: jax.Array  # whether a cause applies, bool [causes, B], in the order of `cause_names`
    key: jax.Array  # of the step, for the action's noise and the draws from the pool


def cause_names(guards: Mapping[str, Guard]) -> list[str]:
    """`guard/cause` of every cause in a record, in the order of `flags`."""
    return [f"{name}/{cause}" for name, guard in guards.items() for cause in guard.causes]


def flags(
    guards: Mapping[str, Guard], ctx: EnvContext, old: Mapping[str, GuardState], new: Mapping[str, GuardState]
) -> jax.Array:
    """The causes for which environments are bad, bool `[causes, B]`, from guard states before and after the step.

    The quarantine reports all its causes per environment; they are terms that its verdict has already computed. Other
    guards only count trips, so their causes are set for every environment of the step.
    """

    def causes(name: str, guard: Guard) -> jax.Array:
        if isinstance(guard, Quarantine):
            return ~guard.fine(ctx)
        tripped = new[name].trips > old[name].trips
        return jnp.broadcast_to(tripped[:, None], (*tripped.shape, *ctx.alive.shape))

    return jnp.concatenate([causes(name, guard) for name, guard in guards.items()])


def empty(guards: Mapping[str, Guard], state: EnvState, action_size: int, devices: int) -> Slot:
    """One empty slot per device, on the host. Reads only the shapes of the state, an argument of `env.step`."""

    def record(state: EnvState, action: jax.Array, key: jax.Array) -> dict[str, PyTree]:
        causes = jnp.zeros((len(cause_names(guards)), len(action)), bool)
        return _record(StepRecord(state, action, state, causes, key), jnp.int32(0), jnp.int32(0))

    action = jax.ShapeDtypeStruct((state.reward.shape[0], action_size), jnp.float32)
    with jax.enable_x64(True):  # keeps float64 physics as float64; other types stay the same too
        shapes = jax.eval_shape(record, state, action, jax.eval_shape(jax.random.PRNGKey, 0))
    blank = jax.tree.map(lambda x: np.zeros((devices, *x.shape), x.dtype), shapes)
    return Slot(np.zeros(devices, bool), np.zeros(devices, np.int32), PackedRows.of(blank))


def catch(slot: Slot, step: StepRecord, bad: jax.Array) -> Slot:
    """Counts the step, and records its first bad environment (bool `[B]`) if this device's slot `[1]` is empty."""

    def fill(slot: Slot) -> Slot:
        record = _record(step, jnp.argmax(bad).astype(jnp.int32), slot.clock[0])
        return Slot(jnp.ones_like(slot.taken), slot.clock, PackedRows.of(jax.tree.map(lambda x: x[None], record)))

    slot = select_if(jnp.any(bad) & ~slot.taken[0], fill, slot)
    return dataclasses.replace(slot, clock=slot.clock + 1)


def _record(step: StepRecord, index: jax.Array, clock: jax.Array) -> dict[str, PyTree]:
    """The record of one environment; typed random keys are stored as integers."""
    batched = {
        "before": _select_physics(_INTEGRATION_STATE, step.before),
        "action": step.action,
        "after": _select_physics(_STEP_RESULT, step.after),
        "causes": step.causes.T,
    }
    own = jax.tree.map(_storable, row(batched, index))
    return own | {"environment": index, "clock": clock, "key": _storable(step.key)}


def _select_physics(names: tuple[str, ...], state: EnvState) -> EnvState:
    """The state with only the named arrays of its physics; physics other than MuJoCo's is kept whole."""
    whole = physics(state)
    # Only MuJoCo's physics has a warm start of the solver.
    if getattr(whole, "qacc_warmstart", None) is None:
        return state
    parts = {name: getattr(whole, name) for name in names if getattr(whole, name, None) is not None}
    return state.replace(**{physics_field(state): parts})


def _storable(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
