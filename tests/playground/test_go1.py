"""Go1 with its own domain randomisation: each robot keeps its mass and friction through a fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("mujoco_playground")

from robots import GO1, use_dummy_meshes
from saved import events

from rlstable.cli.compose import compose
from rlstable.envs.randomized import MODEL
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs", "robot")

WORDS = [
    "env=playground", f"env.name={GO1}", "env.randomize=true", "env.episode_length=10", "env.reset_pool_size=4",
    "ppo.num_envs=4", "ppo.batch_size=4", "ppo.num_minibatches=1", "ppo.num_updates_per_batch=1", "ppo.unroll_length=2",
    "ppo.num_resets_per_eval=0", "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
    "eval.num_evals=0", "eval.at_start=false", "logging=quiet", "supervise.recovery.enabled=false",
    # A network of 8 neurons after 8 steps: its losses mean nothing.
    "guards.value_loss.enabled=false", "guards.policy.enabled=false", "guards.spike.enabled=false",
    "fault.site=physics", "fault.probability=0.05", "fault.iterations=1", "devices=1", "total_steps=16",
]  # fmt: skip


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_dummy_meshes(tmp_path_factory.mktemp("menagerie"), patch)
        yield


def test_faulty_robot_is_quarantined_and_keeps_its_mass_and_friction(tmp_path: Path) -> None:
    config = compose(WORDS)
    loop = TrainingLoop(config, tmp_path)

    def models() -> dict[str, np.ndarray]:
        return {name: np.array(x) for name, x in jax.device_get(loop.single.state.env_state.info[MODEL]).items()}

    before = models()
    for name in (".body_mass", ".geom_friction", ".dof_frictionloss"):
        assert len(np.unique(before[name], axis=0)) == 4, f"each robot has a different {name}"
    assert loop.run().stop_reason is StopReason.completed
    (tripped,) = events(tmp_path, "guard_tripped")
    assert (tripped["guard"], tripped["physics"]) == ("quarantine", 1)
    after = models()
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    state = jax.device_get((loop.single.state.env_state, loop.single.state.params))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state) if np.issubdtype(leaf.dtype, np.floating))
