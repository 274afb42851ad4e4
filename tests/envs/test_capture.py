"""Capture of the first bad environment: complete, without effect on training, and absent if disabled."""

import dataclasses

import jax
import numpy as np
import pytest
from toys import PointMass, assemble, assert_same, compiled, placed, tiny_config

from rlstable.envs.capture import cause_names

pytestmark = pytest.mark.usefixtures("quick_compile")


def started(devices):
    supervise = {"recovery": {"enabled": False}, "incident": {"enabled": True}}
    ppo, state = assemble(tiny_config(guards={}, supervise=supervise))
    return ppo, dataclasses.replace(state, incident=ppo.env.empty_slot(state.env_state, 2, devices))


def poisoned(state, *envs):
    """The state with a bad number in the physics of some environments, which their next step carries on."""
    physics = state.env_state.pipeline_state
    physics = physics.replace(q=np.where(np.isin(np.arange(8), envs)[:, None], np.float32(np.nan), physics.q))
    return dataclasses.replace(state, env_state=state.env_state.replace(pipeline_state=physics))


def held(state, device):
    """The record in the slot of a device."""
    slot = jax.device_get(state.incident)
    return jax.tree.map(lambda x: x[device], slot.record.take(np.arange(len(slot.record))))


def test_each_device_captures_its_first_bad_environment_completely():
    """The numbers of environments are those of the device; trips count the first cause of an environment only."""
    ppo, state = started(devices=2)
    run = compiled(ppo, 2)
    bad = poisoned(state, 1, 6)
    after, metrics = run(placed(bad, 2))
    assert metrics.trips["quarantine"].tolist() == [0, 2, 0, 0, 0, 0, 0]
    assert after.incident.taken.tolist() == [True, True]
    for device, index in ((0, 1), (1, 6)):
        record = held(after, device)
        assert (int(record["environment"]), int(record["clock"])) == (index - 4 * device, 0)
        flags = dict(zip(cause_names(ppo.env.guards), record["causes"].tolist(), strict=True))
        assert [name for name, flag in flags.items() if flag] == [
            f"quarantine/{cause}" for cause in ("physics", "observation", "reward", "metrics")
        ]
        before = jax.tree.map(lambda x, index=index: np.asarray(x)[index], bad.env_state)
        assert_same(record["before"].pipeline_state, before.pipeline_state)
        assert_same(record["before"].obs, before.obs)
        assert_same(record["before"].info["fault_key"], before.info["fault_key"])
        assert "first_state" not in record["before"].info
        stepped = jax.jit(PointMass().step)(record["before"], record["action"])
        assert_same(record["after"].pipeline_state, stepped.pipeline_state)
        assert_same((record["after"].obs, record["after"].reward), (stepped.obs, stepped.reward))
        assert np.isnan(record["after"].reward) and np.abs(record["action"]).max() > 0
    one = placed(poisoned(state, 6), 2)
    assert run(one)[0].incident.taken.tolist() == [False, True]
