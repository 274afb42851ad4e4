"""Resumes a run with other environments, another task or another schedule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from saved import events, lines
from short_runs import short_config
from toys import assert_same

from rlstable.config import Config
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.return_watch import WatchMemory
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64  # environment steps: 16 unrolls of 4


def config(total: int, **sections: Any) -> Config:
    evaluation, checkpoint = {"num_evals": 2, "num_envs": 4}, {"every": 1, "asynchronous": False}
    return short_config(**{"total_steps": total * ITERATION, "eval": evaluation, "checkpoint": checkpoint} | sections)


def test_resume_with_more_environments_resets_them_and_keeps_the_parameters(tmp_path: Path) -> None:
    first = TrainingLoop(config(2), tmp_path)
    first.run()
    ppo = {**config(2).ppo.model_dump(), "num_envs": 16}
    second = TrainingLoop(config(4, resume="auto", ppo=ppo), tmp_path)
    second.single.log.logbook.wait()
    (event,) = events(tmp_path, "environments_redrawn")
    assert (event["num_envs"], event["step"]) == (16, 2 * ITERATION)
    assert_same(second.single.state.params, first.single.state.params)
    assert second.run().stop_reason is StopReason.completed
    assert second.single.state.env_state.done.shape == (16,)
    assert second.single.log.history[-1]["step"] == 4 * ITERATION


def test_resume_that_staggers_the_environments_resets_them(tmp_path: Path) -> None:
    TrainingLoop(config(2), tmp_path).run()
    second = TrainingLoop(config(4, resume="auto", env={"stagger": True}), tmp_path)
    second.single.log.logbook.wait()
    assert len(events(tmp_path, "environments_redrawn")) == 1
    assert np.asarray(second.single.state.env_state.info["steps"]).tolist() == [0, 1, 3, 4, 6, 7, 9, 10]


def test_resume_with_another_task_compares_no_return_of_the_one_before(tmp_path: Path) -> None:
    TrainingLoop(config(4), tmp_path).run()
    second = TrainingLoop(config(8, resume="auto", env={"kwargs": {"bound": 1.0}}), tmp_path)
    seed = second.single
    assert seed.checkpoints.ranked() == [] and seed.checkpoints.all() == [2, 3, 4]
    assert seed.host.best_return is None and seed.host.signs.best_return is None
    assert seed.host.watch == WatchMemory() and seed.snapshots.best.empty
    assert second.run().stop_reason is StopReason.completed
    assert seed.checkpoints.ranked() == [(8, seed.host.best_return)]


@pytest.mark.parametrize(("bound", "ended"), [(1.5, StopReason.target_reached), (1.0, None)])
def test_target_that_another_task_reached_does_not_end_a_resumed_run(
    tmp_path: Path, bound: float, ended: StopReason | None
) -> None:
    target = {"num_evals": 2, "num_envs": 4, "target_return": -1e6}
    first = TrainingLoop(config(4, eval=target, env={"kwargs": {"bound": 1.5}}), tmp_path)
    assert first.run().stop_reason is StopReason.target_reached
    second = TrainingLoop(config(4, eval=target, resume="auto", env={"kwargs": {"bound": bound}}), tmp_path)
    assert second.single.ended_before is ended
    second.close()


@pytest.mark.parametrize(("schedule", "rate"), [("constant", 3e-4), ("adaptive_kl", 0.5)])
def test_resume_without_the_adaptive_schedule_starts_from_the_configured_rate(
    tmp_path: Path, schedule: str, rate: float
) -> None:
    ppo = {**config(2).ppo.model_dump(), "learning_rate": 3e-4, "learning_rate_schedule": "adaptive_kl"}
    first = TrainingLoop(config(1, ppo=ppo), tmp_path)
    tuning = dataclasses.replace(first.single.state.tuning, learning_rate=jnp.float32(0.5))
    first.single.saving.save(dataclasses.replace(first.single.state, tuning=tuning), None)
    first.close()
    second = TrainingLoop(config(2, ppo=ppo | {"learning_rate_schedule": schedule}, resume="auto"), tmp_path)
    assert float(second.single.state.tuning.learning_rate) == np.float32(rate)
    second.close()


def test_resume_in_a_folder_without_a_checkpoint_says_that_training_starts_again(tmp_path: Path) -> None:
    unsaved = {"enabled": False}
    TrainingLoop(config(2, checkpoint=unsaved, resume="auto"), tmp_path).run()
    assert not events(tmp_path, "started_again")
    TrainingLoop(config(1, checkpoint=unsaved, resume="auto"), tmp_path).run()
    (event,) = events(tmp_path, "started_again")
    assert event["reason"] == "the folder has no checkpoint, so its earlier metrics are deleted"
    steps = [row["step"] for row in lines(tmp_path / "metrics.jsonl")]
    assert max(steps) == ITERATION


def test_resume_that_restores_info_resets_the_environments(tmp_path: Path) -> None:
    """The remedy of the sign `training_episodes_short`."""
    env = {"name": "hostile.users:Limited"}
    TrainingLoop(config(2, env=env), tmp_path).run()
    second = TrainingLoop(config(4, resume="auto", env=env | {"restore_info": True}), tmp_path)
    assert second.run().stop_reason is StopReason.completed
    assert len(events(tmp_path, "environments_redrawn")) == 1
