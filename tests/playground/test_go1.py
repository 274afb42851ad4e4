"""Go1 with its own domain randomisation: each robot keeps its mass and friction through a fault and a resume."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("mujoco_playground")

from robots import GO1, use_dummy_meshes

from rlstable.cli.compose import compose
from rlstable.config import Config
from rlstable.envs.randomized import MODEL
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs", "robot")

ITERATION = 8  # environment steps
WORDS = [
    "env=playground", f"env.name={GO1}", "env.randomize=true", "env.episode_length=10", "env.reset_pool_size=4",
    "ppo.num_envs=4", "ppo.batch_size=4", "ppo.num_minibatches=1", "ppo.num_updates_per_batch=1", "ppo.unroll_length=2",
    "ppo.num_resets_per_eval=0", "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
    "eval.num_evals=0", "eval.at_start=false", "logging=quiet", "supervise.recovery.enabled=false",
    # A network of 8 neurons after 8 steps: its losses mean nothing.
    "guards.value_loss.enabled=false", "guards.policy.enabled=false", "guards.spike.enabled=false",
    "fault.site=physics", "fault.probability=0.05", "fault.iterations=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_dummy_meshes(tmp_path_factory.mktemp("menagerie"), patch)
        yield


def go1(iterations: int, devices: int = 1, **more: Any) -> Config:
    words = [*WORDS, f"devices={devices}", f"total_steps={iterations * ITERATION}"]
    return compose([*words, *(f"{key}={value}" for key, value in more.items())])


def models_of(loop: TrainingLoop) -> dict[str, np.ndarray]:
    models = loop.single.state.env_state.info[MODEL]
    return {name: np.array(array) for name, array in jax.device_get(models).items()}


def quarantined(loop: TrainingLoop) -> int:
    """Runs two iterations and requires that no model changes; gives the number of quarantined robots."""
    before = models_of(loop)
    for name in (".body_mass", ".geom_friction", ".dof_frictionloss"):
        assert len(np.unique(before[name], axis=0)) == 4, f"each robot has a different {name}"
    result = loop.run()
    assert result.stop_reason is StopReason.completed
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    trips = [event for event in events if event["kind"] == "guard_tripped"]
    assert [event["guard"] for event in trips] == ["quarantine"]
    after = models_of(loop)
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    state = jax.device_get((loop.single.state.env_state, loop.single.state.params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state) if np.issubdtype(leaf.dtype, np.floating))
    return int(trips[0]["physics"])


def test_faulty_robot_is_quarantined_and_keeps_its_mass_and_friction(tmp_path: Path) -> None:
    assert quarantined(TrainingLoop(go1(2), tmp_path)) == 1


def test_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole = TrainingLoop(go1(2), tmp_path / "whole")
    assert whole.run().step == 2 * ITERATION
    assert TrainingLoop(go1(1), tmp_path / "parts").run().step == ITERATION
    resumed = TrainingLoop(go1(2, resume="auto"), tmp_path / "parts")
    assert resumed.run().step == 2 * ITERATION
    # A saved state has no incident slots.
    states = [dataclasses.replace(loop.single.state, incident=None) for loop in (whole, resumed)]
    for one, other in zip(*(jax.tree.leaves(jax.device_get(state)) for state in states), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_robots_keep_their_models_on_two_devices(tmp_path: Path) -> None:
    assert 1 <= quarantined(TrainingLoop(go1(2, devices=2, **{"fault.probability": 0.2}), tmp_path)) < 4
