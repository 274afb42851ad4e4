"""Capture of the first bad environment: complete, without effect on training, and absent if disabled."""

import dataclasses

import jax
import numpy as np
import pytest
from toys import PointMass, assemble, assert_same, compiled, placed, tiny_config

from rlstable.envs.capture import cause_names

pytestmark = pytest.mark.usefixtures("quick_compile")


def started(devices=1, point=None, **sections):
    supervise = {"recovery": {"enabled": False}, "incident": {"enabled": True}}
    ppo, state = assemble(tiny_config(guards={}, supervise=supervise, **sections), point)
    if devices > 1:
        slot = ppo.env.empty_slot(state.env_state, 2, devices)
        state = dataclasses.replace(state, incident=slot)
    return ppo, state


def poisoned(state, *envs, field="q", value=np.nan):
    """The state with a bad number in the physics of some environments, which their next step carries on."""
    physics = state.env_state.pipeline_state
    hit = np.isin(np.arange(8), envs)[:, None]
    physics = physics.replace(**{field: np.where(hit, value, getattr(physics, field)).astype(np.float32)})
    return dataclasses.replace(state, env_state=state.env_state.replace(pipeline_state=physics))


def held(state, device=0):
    """The record in the slot of a device."""
    slot = jax.device_get(state.incident)
    return jax.tree.map(lambda x: x[device], slot.record.take(np.arange(len(slot.record))))


@pytest.fixture(scope="module")
def program():
    ppo, state = started()
    return ppo, state, compiled(ppo)


def test_first_bad_environment_is_captured_completely(program):
    ppo, state, run = program
    bad = poisoned(state, 5)
    after, metrics = run(placed(bad))
    assert after.incident.taken.tolist() == [True]
    assert metrics.trips["quarantine"].tolist() == [0, 1, 0, 0, 0, 0, 0]
    record = held(after)
    assert (int(record["environment"]), int(record["clock"])) == (5, 0)
    flags = dict(zip(cause_names(ppo.env.guards), record["causes"].tolist(), strict=True))
    # The record has all causes; trips count the first cause only.
    assert [name for name, flag in flags.items() if flag] == [
        f"quarantine/{cause}" for cause in ("physics", "observation", "reward", "metrics")
    ]
    before = jax.tree.map(lambda x: np.asarray(x)[5], bad.env_state)
    assert_same(record["before"].pipeline_state, before.pipeline_state)
    assert_same(record["before"].obs, before.obs)
    assert_same(record["before"].info["fault_key"], before.info["fault_key"])
    assert "first_state" not in record["before"].info
    stepped = jax.jit(PointMass().step)(record["before"], record["action"])
    assert_same(record["after"].pipeline_state, stepped.pipeline_state)
    assert_same((record["after"].obs, record["after"].reward), (stepped.obs, stepped.reward))
    assert np.isnan(record["after"].reward) and np.abs(record["action"]).max() > 0


def test_each_device_captures_its_own_environment():
    ppo, state = started(devices=2)
    run = compiled(ppo, 2)
    after, metrics = run(placed(poisoned(state, 1, 6), 2))
    assert metrics.trips["quarantine"].sum() == 2
    assert after.incident.taken.tolist() == [True, True]
    assert [int(held(after, device)["environment"]) for device in (0, 1)] == [1, 2]
    one = placed(poisoned(state, 6), 2)
    assert run(one)[0].incident.taken.tolist() == [False, True]
