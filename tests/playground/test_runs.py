"""A run on a task of Playground: training, files, commands, resume and the trace cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("mujoco_playground")

from commands import SIZES, exit_code
from saved import events

import rlstable
from rlstable.evaluate import main as evaluate
from rlstable.report.__main__ import main as report
from rlstable.runner.seeds import Result
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")

TASK = "CartpoleBalance"
TINY = [
    *SIZES, "env.episode_length=20", "env.reset_pool_size=8", "devices=1", "total_steps=128", "eval.num_envs=4",
    "eval.num_evals=1", "eval.at_start=false", "ppo.num_updates_per_batch=1", "ppo.num_resets_per_eval=0",
    "guards.value_loss.enabled=false", "guards.policy.enabled=false", "logging=quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run with a fault that quarantines environments."""
    overrides = [*TINY, "fault.site=physics", "fault.probability=0.02"]
    return rlstable.fit(f"playground:{TASK}", run_dir=tmp_path_factory.mktemp("run"), overrides=overrides)


@pytest.fixture
def folder(result: Result) -> Path:
    return result.run_dir


def test_fit_trains_a_task_by_name(result: Result) -> None:
    assert (result.stop_reason, result.step) == (StopReason.completed, 128)
    assert 0.0 < result.metrics["eval/episode_reward"] <= 20.0
    assert result.metrics["eval/avg_episode_length"] == 20.0
    assert {event["guard"] for event in events(result.run_dir, "guard_tripped")} == {"quarantine"}
    assert result.policy.act(np.zeros(5)).shape == (1,)


def test_evaluate_and_report_read_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(evaluate, f"run={folder}", "episodes=4", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["env"], said["episodes"], said["length"]) == (TASK, 4, 20)
    assert exit_code(report, f"run={folder}") == 0
    assert TASK in (folder / "report.html").read_text()


def test_resumed_run_goes_on_with_the_same_task(result: Result) -> None:
    again = rlstable.fit(resume=str(result.run_dir), total_steps=192)
    assert (again.stop_reason, again.step) == (StopReason.completed, 192)
