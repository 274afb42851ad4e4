"""Runs under hostile environments and settings end with a named stop reason, finite parameters and a result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from environments import ATTACKS
from toys import tiny_config

from rlstable import load_policy
from rlstable.io.run_folder import read_result
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATIONS = 12

# Not marked slow. Each attack compiles a program.
QUICK = ("every reward is NaN",)
QUICK_SETTINGS: tuple[str, ...] = ()

NEVER_TRAINED = (
    "every reward is NaN", "every reward is infinite", "every reward is 1e30", "every observation is NaN",
    "observations are the greatest float32", "done is NaN", "the physics is NaN in every step", "a metric is infinite",
)  # fmt: skip

# Attacks by settings, by description.
SETTINGS: dict[str, dict[str, Any]] = {
    "a learning rate of 1e30": {"learning_rate": 1e30},
    "rewards times 1e12": {"reward_scaling": 1e12},
    "an entropy cost of 1e6": {"entropy_cost": 1e6},
    "a clipping of 1e6": {"clipping_epsilon": 1e6, "learning_rate": 1.0},
    "a value coefficient of 1e12": {"vf_loss_coefficient": 1e12},
    "gradients clipped to 1e-30": {"max_grad_norm": 1e-30},
    "a hundred epochs at a high rate": {"num_updates_per_batch": 100, "learning_rate": 0.3},
    "minibatches of one unroll": {"batch_size": 1, "num_minibatches": 16, "learning_rate": 0.3},
}


def train(folder: Path, attack: str = "", bad_resets: float = 0.0, ppo: Any = None) -> Any:
    """The result of a run under default guards, whose parameters are checked."""
    config = tiny_config(
        guards={}, devices=1, seed=3, total_steps=ITERATIONS * 64, ppo=ppo or {},
        env={"name": "environments:Hostile", "kwargs": {"attack": attack, "bad_resets": bad_resets}},
        eval={"num_evals": 2, "num_envs": 4}, logging={"console": "off"}, supervise={},
        checkpoint={"every": 1, "asynchronous": False},
    )  # fmt: skip
    runner = TrainingLoop(config, folder)
    result = runner.run()
    left = read_result(folder)
    assert left is not None and left["stop_reason"] == result.stop_reason.name
    state = runner.single.state
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.normalizer)):
        if np.issubdtype(np.asarray(leaf).dtype, np.floating):
            assert np.isfinite(leaf).all()
    assert result.stop_reason in (StopReason.completed, StopReason.physics_unstable, StopReason.recovery_exhausted)
    if result.stop_reason.succeeded:
        assert np.isfinite(load_policy(folder).act(np.zeros(4, np.float32))).all()
    return result


def _marked(attacks: Iterable[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in attacks]


@pytest.mark.parametrize("attack", _marked(ATTACKS, QUICK))
def test_run_in_a_hostile_environment_ends_with_a_stop_reason_and_finite_parameters(
    tmp_path: Path, attack: str
) -> None:
    result = train(tmp_path, attack)
    # A run without an accepted update has not trained.
    assert result.stop_reason.succeeded is (attack not in NEVER_TRAINED)


@pytest.mark.parametrize("settings", _marked(SETTINGS, QUICK_SETTINGS))
def test_run_with_hostile_settings_ends_with_a_stop_reason_and_finite_parameters(tmp_path: Path, settings: str) -> None:
    train(tmp_path, ppo=SETTINGS[settings])


@pytest.mark.slow
def test_run_completes_with_nine_of_ten_resets_bad(tmp_path: Path) -> None:
    assert train(tmp_path, bad_resets=0.9).stop_reason is StopReason.completed
