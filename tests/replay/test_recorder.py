"""The recorder of one environment keeps the newest steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strange import Keyed
from toys import NamedPointMass

from rlstable.guards.env import Quarantine
from rlstable.replay.recorder import RecordedEnv

pytestmark = pytest.mark.usefixtures("quick_compile")
GUARDS = {"quarantine": Quarantine()}  # which finds nothing but what is not finite


def steps_of(env: RecordedEnv, count: int) -> list[Any]:
    """State, action and recording before every step, and after the last."""
    state = env.reset(jax.random.split(jax.random.PRNGKey(0), 3))
    recording = jax.tree.map(jnp.asarray, env.empty_slot(state, 2, 1))
    guard_state = {name: guard.init() for name, guard in env.guards.items()}

    @jax.jit
    def step(state: Any, action: jax.Array, recording: Any) -> Any:
        # Nothing ends here and nothing is replaced, so that no pool is needed.
        stepped, _, _, recording = env.repeat_action(state, action, guard_state, recording, jax.random.PRNGKey(1))
        return stepped, recording

    seen = []
    for n in range(count):
        action = jax.random.normal(jax.random.PRNGKey(n), (3, 2))
        seen.append((state, action, recording))
        state, recording = step(state, action, recording)
    return [*seen, (state, action, recording)]


def watched(trees: list[Any]) -> Any:
    """What is recorded of such states: those of the last environment, and typed keys as integers."""

    def plain(x: jax.Array) -> np.ndarray:
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)[2]

    return jax.tree.map(lambda *x: np.stack([plain(y) for y in x]), *trees)


def same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("env", [NamedPointMass(), Keyed()], ids=["named observations", "typed keys"])
def test_recorder_keeps_the_newest_steps_in_order(env: Any) -> None:
    seen = steps_of(RecordedEnv(env, 100, 1, GUARDS, watched=2, length=4), 6)
    for end, first in ((3, 0), (6, 2)):  # before the ring is full, and after it was written over
        found = jax.device_get(seen[end][2]).last(0)
        states = [state for state, _, _ in seen[first : end + 1]]
        same(found["before"].pipeline_state, watched([state.pipeline_state for state in states[:-1]]))
        same(found["before"].obs, watched([state.obs for state in states[:-1]]))
        keys = [{name: x for name, x in state.info.items() if name in ("fault_key", "typed")} for state in states[:-1]]
        same({name: found["before"].info[name] for name in keys[0]}, watched(keys))
        same(found["action"], watched([action for _, action, _ in seen[first:end]]))
        same(found["reward"], watched([state.reward for state in states[1:]]))
