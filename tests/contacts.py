"""Point masses that touch the ground, with all contacts of all environments in arrays without a batch axis.

The physics state has the layout of MJX-Warp, whose kernels would take a minute to compile.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.interpreters import batching
from toys import PointMass, State


@struct.dataclass
class Contacts:
    """Contact arrays `[naconmax]` of all environments, the number of contacts and of steps so far, both `[1]`.

    `contact__unused` has no elements, and `force` has a batch axis.
    """

    contact__dist: jax.Array
    contact__pos: jax.Array
    contact__worldid: jax.Array
    contact__unused: jax.Array
    nacon: jax.Array
    steps: jax.Array
    force: jax.Array


_SHARED = ("contact__dist", "contact__pos", "contact__worldid", "contact__unused", "nacon", "steps")


def _map(convert: Any, contacts: Contacts) -> Contacts:
    return Contacts(**{name: x if name in _SHARED else convert(x) for name, x in vars(contacts).items()})


batching.register_vmappable(
    Contacts, int, int,
    lambda unbatched, _, contacts, axis: _map(lambda x: unbatched(x, axis), contacts),
    lambda batched, size, contacts, axis: _map(lambda x: batched(size, x, axis), contacts),
    None,
)  # fmt: skip


@struct.dataclass
class Physics:
    """Physics of `PointMass`, and its contacts where MJX has what only one implementation has."""

    q: jax.Array
    qd: jax.Array
    warm_start: jax.Array
    _impl: Contacts


@jax.custom_batching.custom_vmap
def touch(q: jax.Array, bad: jax.Array, contacts: Contacts) -> Contacts:
    """The contacts of one environment."""
    touched = touch_all(q[None], bad[None], contacts.replace(force=contacts.force[None]))
    return touched.replace(force=touched.force[0])


@touch.def_vmap
def _touch_vmapped(size: int, batched: Any, q: jax.Array, bad: jax.Array, contacts: Contacts) -> Any:
    q, bad, force = (
        x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, is_batched in ((q, batched[0]), (bad, batched[1]), (contacts.force, batched[2].force))
    )
    axes = {name: name == "force" for name in vars(contacts)}
    return touch_all(q, bad, contacts.replace(force=force)), Contacts(**axes)


def touch_all(q: jax.Array, bad: jax.Array, contacts: Contacts) -> Contacts:
    """The contacts of all environments, the last environment's first; the entries after them are not numbers."""
    room, count = len(contacts.contact__worldid), min(len(q), len(contacts.contact__worldid))
    world = jnp.arange(len(q))[::-1][:count]
    dist = jnp.where(bad, jnp.nan, jnp.linalg.norm(q, axis=-1))[world]
    pos = jnp.concatenate([q, jnp.zeros((len(q), 1))], axis=-1)[world]
    left = room - count
    return Contacts(
        contact__dist=jnp.pad(dist, (0, left), constant_values=jnp.nan),
        contact__pos=jnp.pad(pos, ((0, left), (0, 0)), constant_values=jnp.nan),
        contact__worldid=jnp.pad(world.astype(jnp.int32), (0, left), constant_values=0),
        contact__unused=contacts.contact__unused,
        nacon=jnp.array([count], jnp.int32),
        steps=contacts.steps + 1,
        force=contacts.force + 1.0,
    )


class Touching(PointMass):
    """`PointMass` with one contact per environment, in arrays of the length `naconmax`.

    At the age `bad_at`, only the contact of environments with `info["chosen"]` is not a number; 0 for never. The age,
    `force`, is 1 at the first state.
    """

    def __init__(self, naconmax: int = 12, bad_at: int = 0, **kwargs: Any):
        super().__init__(**kwargs)
        self.naconmax = naconmax
        self.bad_at = bad_at

    def reset(self, rng: jax.Array) -> State:
        state = super().reset(rng)
        n = self.naconmax
        empty = Contacts(
            jnp.full(n, jnp.nan), jnp.full((n, 3), jnp.nan), jnp.zeros(n, jnp.int32), jnp.zeros((0, 2)),
            jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(()),
        )  # fmt: skip
        contacts = touch(state.pipeline_state.q, jnp.zeros((), bool), empty)
        return self._with(state, contacts).replace(info={**state.info, "chosen": jnp.zeros(())})

    def step(self, state: State, action: jax.Array) -> State:
        before = state.pipeline_state._impl
        state = super().step(state, action)
        bad = (state.info["chosen"] > 0) & (before.force == self.bad_at) & (self.bad_at > 0)
        return self._with(state, touch(state.pipeline_state.q, bad, before))

    @staticmethod
    def _with(state: State, contacts: Contacts) -> State:
        whole = state.pipeline_state
        return state.replace(pipeline_state=Physics(whole.q, whole.qd, whole.warm_start, contacts))
