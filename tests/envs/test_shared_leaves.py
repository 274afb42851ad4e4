"""Arrays without a batch axis, as MJX-Warp's contacts: found by tracing, never selected by environment."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contacts import Contacts, Touching
from saved import rows
from short_runs import short_config
from toys import step_alone

from rlstable.config import ConfigError
from rlstable.config.guards import GuardsConfig
from rlstable.device import sharding
from rlstable.device.shared import Shared, shared_in, unmarked, without_shared
from rlstable.envs.shared_leaves import contact_norms
from rlstable.envs.vector import VectorEnv, pool_of
from rlstable.ppo.guards import env_guards
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile")

GUARDS = env_guards(GuardsConfig())
COUNT, STEPS, BAD_AT, CHOSEN = 6, 5, 3, 4
SHARED = ["contact__dist", "contact__pos", "contact__worldid", "contact__unused", "nacon", "steps"]


def keys(count: int = COUNT) -> jax.Array:
    return jax.random.split(jax.random.PRNGKey(0), count)


def touching(naconmax: int, bad_at: int = BAD_AT, per_pass: int | None = None, length: int = 100) -> VectorEnv:
    return VectorEnv(Touching(naconmax, bad_at), length, 1, GUARDS, per_pass=per_pass)


@functools.cache
def unrolled(naconmax: int, chosen: int | None, per_pass: int | None = None, length: int = 100) -> Any:
    """First states, validity `[STEPS, COUNT]`, last states and last guard state of a few steps."""
    env = touching(naconmax, per_pass=per_pass, length=length)

    @jax.jit
    def unroll() -> Any:
        first = env.reset(keys())
        pool = pool_of(env.reset(keys(2)))
        marks = jnp.arange(COUNT) == (-1 if chosen is None else chosen)
        first = first.replace(info={**first.info, "chosen": marks.astype(float)})

        def step(carry: Any, key: jax.Array) -> Any:
            state, guards = carry
            result = step_alone(env, state, jnp.full((COUNT, 2), 0.1), pool, key, guards)
            return (result.state, result.guard_state), result.valid

        start = first, {name: guard.init() for name, guard in GUARDS.items()}
        (state, guards), valid = jax.lax.scan(step, start, jax.random.split(jax.random.PRNGKey(1), STEPS))
        return first, valid, state, guards

    return jax.device_get(unroll())


def contacts_of(state: Any) -> Contacts:
    contacts: Contacts = state.pipeline_state._impl
    return contacts


@pytest.mark.parametrize("naconmax", [COUNT, COUNT + 1, 1, 20])
def test_leaves_of_the_same_shape_at_two_batch_sizes_are_shared_whatever_their_length(naconmax: int) -> None:
    state = jax.eval_shape(touching(naconmax).reset, keys())
    contacts = contacts_of(state)
    assert [name for name, x in vars(contacts).items() if isinstance(x, Shared)] == SHARED
    assert contacts.contact__dist.value.shape == (1, naconmax)
    assert len(shared_in(state)) == len(SHARED)
    assert all(x.shape[0] == COUNT for x in jax.tree.leaves(without_shared(state)))


def test_leaf_with_two_rows_per_environment_is_refused_in_one_line() -> None:
    class Doubled(Touching):
        def reset(self, rng: jax.Array) -> Any:
            state = super().reset(rng)
            size = rows.pop()
            contacts = state.pipeline_state._impl.replace(contact__dist=jnp.zeros(size))
            return self._with(state, contacts)

    rows = [2 * COUNT + 2, 2 * COUNT]
    with pytest.raises(ConfigError) as error:
        VectorEnv(Doubled(), 100, 1, {}).reset(keys())
    assert str(error.value) == (
        "env.name: reset returns pipeline_state._impl.contact__dist with shape (12,) for 6 environments and (14,) for "
        "7; it must have one row per environment, or the same shape"
    )


@pytest.mark.parametrize("per_pass", [None, 4], ids=["whole", "in passes"])
@pytest.mark.parametrize("naconmax", [COUNT, 20], ids=["as many as environments", "more"])
def test_bad_contact_quarantines_exactly_the_environment_in_its_worldid(naconmax: int, per_pass: int | None) -> None:
    _, valid, state, guards = unrolled(naconmax, CHOSEN, per_pass)
    expected = np.ones((STEPS, COUNT), bool)
    expected[BAD_AT - 1, CHOSEN] = False
    assert valid.tolist() == expected.tolist()
    causes = dict(zip(GUARDS["quarantine"].causes, guards["quarantine"].trips.tolist(), strict=True))
    assert causes == {**dict.fromkeys(causes, 0), "physics": 1}
    healthy = unrolled(naconmax, None, per_pass)[2]
    others = np.arange(COUNT) != CHOSEN
    ours, theirs = (without_shared(x.replace(info={**x.info, "chosen": x.done})) for x in (state, healthy))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(a[others], b[others])


@pytest.mark.parametrize(
    ("length", "ages"),
    [(100, [6, 6, 6, 6, 1 + STEPS - BAD_AT, 6]), (2, [2] * COUNT)],
    ids=["a quarantine", "episodes of two steps"],
)
def test_shared_leaves_pass_through_while_environments_are_reset(length: int, ages: list[int]) -> None:
    first, _, state, _ = unrolled(COUNT, CHOSEN, length=length)
    assert contacts_of(first).steps.value.tolist() == [[1]]
    assert contacts_of(state).steps.value.tolist() == [[1 + STEPS]]
    assert contacts_of(state).contact__worldid.value.tolist() == [[5, 4, 3, 2, 1, 0]]
    assert contacts_of(state).force.tolist() == ages


def test_contact_norms_ignore_entries_after_the_last_contact_and_unknown_environments() -> None:
    env = touching(8)
    state = jax.eval_shape(env.reset, keys(3))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
    contacts = contacts_of(state).replace(
        contact__dist=Shared(jnp.array([[3.0, 1.0, jnp.inf, 7.0, 9.0, jnp.nan, jnp.nan, jnp.nan]])),
        contact__pos=Shared(jnp.zeros((1, 8, 3)).at[0, 0, 1].set(-4.0)),
        contact__worldid=Shared(jnp.array([[2, 2, 0, 3, -7, 1, 1, 1]], jnp.int32)),
        nacon=Shared(jnp.array([[5]], jnp.int32)),
    )
    state = state.replace(pipeline_state=state.pipeline_state.replace(_impl=contacts))
    assert contact_norms(state).tolist() == [np.inf, 0.0, 5.0]


# --- whole runs


def settings(iterations: int, naconmax: int = 8, **sections: Any) -> Any:
    env = {"name": "contacts:Touching", "kwargs": {"naconmax": naconmax, "bad_at": 2}, "episode_length": 12}
    checkpoint = {"every": 1, "asynchronous": False}
    return short_config(**{"env": env, "total_steps": 64 * iterations, "checkpoint": checkpoint} | sections)


def test_bad_contact_on_the_second_of_two_devices_quarantines_one_environment(tmp_path: Path) -> None:
    loop = TrainingLoop(settings(1, naconmax=4, devices=2), tmp_path)
    run = loop.single
    env_state = run.state.env_state
    marks = sharding.place(np.arange(8) == 6, run.programs.mesh, sharding.SPLIT)
    env_state = env_state.replace(info={**env_state.info, "chosen": marks.astype(jnp.float32)})
    run.state = dataclasses.replace(run.state, env_state=env_state)
    assert contacts_of(env_state).contact__dist.value.shape == (2, 4)
    loop.advance()
    state = run.state.env_state
    assert contacts_of(state).steps.value.tolist() == [[1 + 64 // 8]] * 2
    assert contacts_of(unmarked(state)).contact__worldid.tolist() == [3, 2, 1, 0]
    loop.close()
    (row,) = rows(tmp_path)
    assert (row["guards/quarantine/trips"], row["guards/quarantine/physics"]) == (1, 1)
    # The pool's first state is not marked.
    assert np.asarray(state.info["chosen"]).tolist() == [0.0] * 8
