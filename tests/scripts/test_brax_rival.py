"""The fault that Brax's own PPO is given: where it appears, when, and that nothing else changes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import PointMass

PATH = Path(__file__).resolve().parents[2] / "scripts" / "brax_rival.py"
ENVS, STEPS, EPISODE = 8, 60, 10
BAD = 1e30

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def rival() -> Any:
    spec = importlib.util.spec_from_file_location("brax_rival", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["brax_rival"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def rollout(rival: Any, seed: int = 0, **fault: Any) -> tuple[Any, Any]:
    """First states, and every state of a rollout under Brax's training wrappers, with the actions all 0."""
    from brax.envs.wrappers.training import wrap

    env = wrap(rival.FaultyBraxEnv(PointMass(), rival.Fault(**fault), seed), episode_length=EPISODE)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state = env.step(state, jnp.zeros((ENVS, 2)))
        return state, state

    first = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(seed), ENVS))
    return jax.device_get((first, jax.jit(lambda first: jax.lax.scan(step, first, length=STEPS)[1])(first)))


def hits(states: Any) -> dict[str, np.ndarray]:
    """By place, where the bad number is: arrays (STEPS, ENVS)."""
    return {
        "physics": states.pipeline_state.q[..., 0] == np.float32(BAD),
        "observation": states.obs[..., 0] == np.float32(BAD),
        "reward": states.reward == np.float32(BAD),
        "done": states.done == np.float32(BAD),
        "metrics": states.metrics[min(states.metrics)] == np.float32(BAD),
        "info": states.info["fault_probe"] == np.float32(BAD),
    }


@pytest.mark.parametrize("site", ["observation", "reward", "metrics", "info", "done"])
def test_the_bad_number_is_at_its_site_alone(rival: Any, site: str) -> None:
    _, states = rollout(rival, site=site, value=BAD, probability=0.1)
    found = hits(states)
    assert 0.03 < found.pop(site).mean() < 0.2
    assert not any(where.any() for where in found.values())


def test_fault_keeps_its_window_over_automatic_resets(rival: Any) -> None:
    _, states = rollout(rival, site="reward", value=BAD, probability=1.0, first_step=15, last_step=34)
    when = hits(states)["reward"]
    assert when[15:35].all() and when.sum() == 20 * ENVS
    np.testing.assert_array_equal(states.info["fault"]["count"][:, 0], np.arange(1, STEPS + 1))
    assert (states.info["steps"].max(axis=0) == EPISODE).all()


def test_the_same_seed_gives_the_same_faults(rival: Any) -> None:
    fault = {"site": "reward", "value": BAD, "probability": 0.1}
    one, again, other = (hits(rollout(rival, seed, **fault)[1])["reward"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()


def test_bad_physics_shows_in_the_observation_and_all_is_all(rival: Any) -> None:
    _, states = rollout(rival, site="all", value=BAD, probability=0.05)
    found = hits(states)
    np.testing.assert_array_equal(found["physics"], found["observation"])
    steps = found["physics"].all(axis=1)
    np.testing.assert_array_equal(steps, found["physics"].any(axis=1))
    assert steps.any() and not steps.all()


def test_a_share_of_resets_is_bad(rival: Any) -> None:
    first, _ = rollout(rival, site="reset", value=math.nan, probability=0.5)
    assert 0 < np.isnan(first.obs[:, 0]).sum() < ENVS
    healthy, states = rollout(rival)
    assert np.isfinite(healthy.obs).all() and np.isfinite(states.obs).all()


def test_what_is_not_there_is_refused(rival: Any) -> None:
    with pytest.raises(ValueError, match="site"):
        rival.Fault(site="nowhere")
    with pytest.raises(ValueError, match="warm_start"):
        rollout(rival, site="warm_start", value=BAD, probability=0.1)


def test_every_device_has_a_copy(rival: Any) -> None:
    devices = jax.local_devices()[:2]
    given = rival.device_put_replicated({"a": np.arange(3.0), "b": 7}, devices)
    assert given["a"].shape == (len(devices), 3) and given["b"].shape == (len(devices),)
    moved = jax.pmap(lambda tree: tree["a"] + tree["b"], devices=devices)(given)
    np.testing.assert_array_equal(moved, np.tile(np.arange(7.0, 10.0), (len(devices), 1)))
