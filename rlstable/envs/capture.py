"""Records the first bad environment of every device, inside the compiled program, before the quarantine resets it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from rlstable.device.packed import PackedRows
from rlstable.device.shared import row, without_shared
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
        return _record(packed(state), (action, state, causes), jnp.int32(0), jnp.int32(0), key)

    action = jax.ShapeDtypeStruct((state.reward.shape[0], action_size), jnp.float32)
    with jax.enable_x64(True):  # keeps float64 physics as float64; other types stay the same too
        shapes = jax.eval_shape(record, state, action, jax.eval_shape(jax.random.PRNGKey, 0))
    blank = jax.tree.map(lambda x: np.zeros((devices, *x.shape), x.dtype), shapes)
    return Slot(np.zeros(devices, bool), np.zeros(devices, np.int32), PackedRows.of(blank))


def catch(slot: Slot, action: jax.Array, after: EnvState, causes: jax.Array, key: jax.Array, bad: jax.Array) -> Slot:
    """Counts the step, and records its first bad environment (bool `[B]`) if this device's slot `[1]` is empty.

    `after` is the result of `env.step` before any environment is reset, `causes` are `flags`, `key` is the step's.
    """

    def fill(slot: Slot) -> Slot:
        index = jnp.argmax(bad).astype(jnp.int32)
        record = _record(slot.before, (action, after, causes), index, slot.clock[0], key)
        rows = PackedRows.of(jax.tree.map(lambda x: x[None], record))
        return dataclasses.replace(slot, taken=jnp.ones_like(slot.taken), record=rows)

    slot = select_if(jnp.any(bad) & ~slot.taken[0], fill, slot)
    return dataclasses.replace(slot, clock=slot.clock + 1)


def packed(state: EnvState) -> PackedRows:
    """The parts of batched states, arguments of `env.step`, that a replay needs."""
    return PackedRows.of(without_shared(_select_physics(_INTEGRATION_STATE, state)))


def _record(before: PackedRows, step: PyTree, index: jax.Array, clock: jax.Array, key: jax.Array) -> dict[str, PyTree]:
    """The record of one environment; typed random keys are stored as integers."""
    action, after, causes = step
    own = row({"action": action, "after": _select_physics(_STEP_RESULT, after), "causes": causes.T}, index)
    own = jax.tree.map(_storable, own | {"before": before.take(index), "key": key})
    return own | {"environment": index, "clock": clock}


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
