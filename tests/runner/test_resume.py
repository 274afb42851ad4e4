"""Resuming a run: other environments, tasks, schedules and settings, and mistakes before a state is read."""

from __future__ import annotations

import copy
import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import short_runs
import yaml
from saved import events, lines
from short_runs import short_config
from toys import GUARDS_OFF, assert_same, tiny_config

from rlstable.cli.compose import compose
from rlstable.config import Config, ConfigError
from rlstable.io.checkpoint import Checkpoints
from rlstable.policy.policy import load_policy
from rlstable.report.page import page
from rlstable.report.run_record import read_record
from rlstable.runner.host_state import HostState
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.resume import changes, resume
from rlstable.supervise.return_watch import WatchState
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64  # environment steps: 16 unrolls of 4


def config(total: int, **sections: Any) -> Config:
    evaluation, checkpoint = {"num_evals": 2, "num_envs": 4}, {"every": 1, "asynchronous": False}
    defaults = {"guards": GUARDS_OFF, "eval": evaluation, "checkpoint": checkpoint}
    return short_config(**defaults | {"total_steps": total * ITERATION} | sections)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        ({"ppo": config(2).ppo.model_dump() | {"num_envs": 16}}, [0] * 16),
        ({"env": {"stagger": True}}, [0, 1, 3, 4, 6, 7, 9, 10]),
        ({"env": {"restore_info": True}}, [0] * 8),  # the remedy of the sign `training_episodes_short`
    ],
    ids=["more environments", "stagger", "restore info"],
)
def test_resume_with_other_environments_resets_them_and_keeps_the_parameters(
    tmp_path: Path, change: dict[str, Any], steps: list[int]
) -> None:
    first = TrainingLoop(config(2), tmp_path)
    first.run()
    second = TrainingLoop(config(4, resume="auto", **change), tmp_path)
    second.single.log.logbook.wait()
    (event,) = events(tmp_path, "environments_redrawn")
    assert (event["num_envs"], event["step"]) == (len(steps), 2 * ITERATION)
    assert_same(second.single.state.params, first.single.state.params)
    assert np.asarray(second.single.state.env_state.info["steps"]).tolist() == steps
    assert second.run().stop_reason is StopReason.completed
    assert second.single.state.env_state.done.shape == (len(steps),)
    assert second.single.log.history[-1]["step"] == 4 * ITERATION


def test_resume_with_another_task_compares_no_return_of_the_one_before(tmp_path: Path) -> None:
    TrainingLoop(config(4), tmp_path).run()
    second = TrainingLoop(config(8, resume="auto", env={"kwargs": {"bound": 1.0}}), tmp_path)
    seed = second.single
    assert seed.checkpoints.ranked() == [] and seed.checkpoints.all() == [2, 3, 4]
    assert seed.host.best_return is None and seed.host.signs.best_return is None
    assert seed.host.watch == WatchState() and seed.snapshots.best.empty
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


ONE = {"total_steps": 64, "checkpoint": {"every": 1}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_runs.trained(tmp_path_factory.mktemp("run"), **ONE).run_dir


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def edit(file: Path, section: str, key: str, value: Any) -> None:
    settings = yaml.safe_load(file.read_text())
    settings[section][key] = value
    file.write_text(yaml.safe_dump(settings))


def told(folder: Path) -> list[dict[str, Any]]:
    """The events of changed settings, without step and kind."""
    return [{key: event[key] for key in ("key", "old", "new")} for event in events(folder, "configuration_changed")]


def test_edited_and_typed_settings_are_events_and_on_the_page(folder: Path) -> None:
    edit(folder / "config.yaml", "ppo", "num_resets_per_eval", 1)  # compiles no other program
    # The folder is a copy, so the user has to trust it.
    config = compose([f"resume={folder}", "total_steps=128", "trust=true"])
    assert TrainingLoop(config, folder).run().stop_reason is StopReason.completed
    assert told(folder) == [
        {"key": "ppo.num_resets_per_eval", "old": 0, "new": 1},
        {"key": "total_steps", "old": 64, "new": 128},
    ]
    assert "configuration_changed: ppo.num_resets_per_eval: 0 -&gt; 1" in page([read_record(folder)])
    assert load_policy(folder, "latest").host["config"]["ppo"]["num_resets_per_eval"] == 1
    # A change is logged once, not at every later resume.
    TrainingLoop(compose([f"resume={folder}", "total_steps=192"]), folder).run()
    assert [event["key"] for event in told(folder)] == ["ppo.num_resets_per_eval", "total_steps", "total_steps"]


def test_changed_folders_and_loggers_are_not_logged(folder: Path) -> None:
    saved = load_policy(folder, "latest").host["config"]
    logging = {"console": "lines", "wandb": {"name": "other"}}
    other = short_runs.short_config(**ONE, resume="auto", compile_cache=None, logging=logging)
    assert changes(saved, other.model_dump(mode="json")) == []
    assert "configuration_changed" not in page([read_record(folder)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda saved: saved.update(more=1), "HostState differs in more"),
        (lambda saved: saved.pop("episodes"), "HostState differs in episodes"),
        (lambda saved: saved["tally"].pop("void"), "Tally differs in void"),
        (lambda saved: saved["watch"].update(more=1), "more"),
        (lambda saved: saved.update(plan=[]), "list"),
    ],
)
def test_host_state_of_another_version_is_one_line(change: Any, why: str) -> None:
    saved = copy.deepcopy(dataclasses.asdict(HostState()))
    host = HostState(iteration=1)
    host.read(copy.deepcopy(saved))
    assert host == HostState()
    change(saved)
    with pytest.raises(ConfigError, match=rf"^resume: another version of rlstable saved the host state \(.*{why}"):
        host.read(saved)


def test_run_folder_that_a_process_does_not_see_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = SimpleNamespace(
        is_writer=lambda: False, from_writer=lambda name, value: 7, gather=lambda name, value: [True, value]
    )
    monkeypatch.setattr("rlstable.runner.resume.hosts", second)
    config = tiny_config()
    seed: Any = SimpleNamespace(config=config, host=None, programs=None, state=None)
    with Checkpoints(tmp_path, config.checkpoint) as seed.checkpoints, pytest.raises(ConfigError) as caught:
        resume(seed)
    assert str(caught.value) == (
        f"resume: process 1 does not find checkpoint 7 in {tmp_path / 'checkpoints'}, which process 0 reads; resume in "
        "a folder that all hosts share"
    )
