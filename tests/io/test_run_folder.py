"""A run and its folder: one run at a time, undamaged checkpoints only, failed saves are retried."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from saved import events, rows
from short_runs import short_config
from toys import assert_same

from rlstable.config import Config, ConfigError
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.jsonl import JsonLines
from rlstable.io.run_folder import newest_run
from rlstable.io.versions import versions
from rlstable.policy.policy import load_policy
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64  # environment steps of the miniature: 16 unrolls of 4


def quick(iterations: int = 3, **sections: Any) -> Config:
    return short_config(**{"total_steps": iterations * ITERATION, "checkpoint": {"every": 1, "keep": 3}} | sections)


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    TrainingLoop(quick(), tmp_path).run()
    return tmp_path


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize(
    "name", ["config.yaml", "result.json", "report.html", "checkpoints/.retired/mine", "metrics.jsonl"]
)
def test_folder_with_a_file_of_the_user_is_refused_and_keeps_it(
    name: str, resume: str | None, seeds: int, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine: 1")
    held = tmp_path / name.split("/")[0]
    with pytest.raises(
        ConfigError, match=rf"^hydra\.run\.dir: {held} would be replaced, and rlstable did not write it"
    ):
        TrainingLoop(quick(resume=resume, seeds=seeds), tmp_path)
    assert file.read_text() == "mine: 1"
    assert [path.name for path in tmp_path.iterdir()] == [held.name]


def test_run_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    first = TrainingLoop(quick(), tmp_path)
    with pytest.raises(ConfigError, match=rf"^hydra\.run\.dir: {tmp_path} is in use by process {os.getpid()} on "):
        TrainingLoop(quick(resume="auto"), tmp_path)
    assert first.run().stop_reason is StopReason.completed  # unharmed
    assert not (tmp_path / ".lock").exists()
    assert TrainingLoop(quick(4, resume="auto"), tmp_path).run().step == 4 * ITERATION


def test_newest_run_is_the_one_whose_files_changed_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "missing") is None and newest_run(tmp_path) is None
    times = {"ant/1/config.yaml": 1, "ant/2/config.yaml": 5, "ant/2/metrics.jsonl": 3, "sweeps/a/0/config.yaml": 4}
    others = {"ant/1/seed-0/metrics.jsonl": 6, "ant/2/report.html": 9, "note/metrics.jsonl": 9}
    for name, seconds in (times | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    assert newest_run(tmp_path) == tmp_path / "ant" / "1"
    os.utime(tmp_path / "sweeps/a/0/config.yaml", (7, 7))
    assert newest_run(tmp_path) == tmp_path / "sweeps" / "a" / "0"
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.yaml").symlink_to("nowhere")
    assert newest_run(tmp_path) == tmp_path / "sweeps" / "a" / "0"


def test_runs_that_start_in_the_same_second_have_different_folders(here: Path) -> None:
    code = (
        "import sys; from rlstable.io.run_folder import default_run_dir as f; print(f(None, 'a:B'), f('auto', 'a:B'))"
    )
    command = [sys.executable, "-c", code]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=here) for _ in range(3)]
    folders = " ".join(start.communicate(timeout=60)[0] for start in starts).split()
    assert len(set(folders)) == 6
    assert all(re.fullmatch(r"runs/a\.B/[\d-]+_\d\d-\d\d-\d\d(-\d)?", folder) for folder in folders)
    assert sorted(folders) == sorted(str(folder) for folder in Path("runs").glob("*/*"))


@pytest.mark.parametrize("seeds", [1, 2])
def test_resume_with_another_run_folder_continues_in_a_copy_with_its_own_wandb_runs(
    seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str | None] = []

    def init(**args: Any) -> Any:
        started.append(args["id"])
        return SimpleNamespace(id=f"run-{len(started)}", step=0, log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    config = quick(1, seeds=seeds, logging={"console": "off", "wandb": {"mode": "online"}})
    original, copy = tmp_path / "original", tmp_path / "copy"
    TrainingLoop(config, original).run()
    before = {file: file.read_bytes() for file in original.rglob("*") if file.is_file()}
    more = config.model_copy(update={"resume": str(original), "total_steps": 128})
    result = TrainingLoop(more, copy).run()
    assert (result.stop_reason, result.step, result.run_dir) == (StopReason.completed, 128, copy)
    TrainingLoop(more.model_copy(update={"resume": "auto", "total_steps": 192}), copy).close()
    assert started == [None] * 2 * seeds + [f"run-{seeds + n + 1}" for n in range(seeds)]
    assert {file: file.read_bytes() for file in original.rglob("*") if file.is_file()} == before
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir: .*copy already holds a run; set resume=auto"):
        TrainingLoop(more, copy)
    with pytest.raises(ConfigError, match=r"^resume: .*nothing holds no checkpoint"):
        TrainingLoop(config.model_copy(update={"resume": str(tmp_path / "nothing")}), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["a\\b", "run [1]", "lr=*", "what?"])
def test_folder_whose_name_orbax_reads_as_a_pattern_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^hydra\.run\.dir: cannot save checkpoints in .*; choose a name"):
        TrainingLoop(quick(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_start_that_fails_after_its_settings_are_written_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    logging = {"console": "off", "tensorboard": True}
    with pytest.raises(ConfigError, match=r"^logging\.tensorboard: needs the package"):
        TrainingLoop(quick(logging=logging), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_failed_run_releases_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("rlstable.runner.setup.TrainingSetup.first_state", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            TrainingLoop(quick(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    runner = TrainingLoop(quick(), tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(runner._seeds, "finish", lambda *_: 1 / 0)  # the last thing there is
        with pytest.raises(ZeroDivisionError):
            runner.run()
    with contextlib.closing(TrainingLoop(quick(resume="auto"), tmp_path)) as again:
        assert again.single.host.step == 3 * ITERATION


def test_run_with_a_damaged_newest_checkpoint_resumes_from_the_one_before(finished: Path, tmp_path: Path) -> None:
    whole = TrainingLoop(quick(5), tmp_path / "whole")
    whole.run()
    [path] = (finished / "checkpoints/3/state/d").iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    resumed = TrainingLoop(quick(5, resume="auto"), finished)
    assert resumed.single.host.step == 2 * ITERATION
    resumed.run()
    [damaged, went_on] = events(finished, "checkpoint_damaged", "resumed")
    assert (damaged["kind"], damaged["checkpoint"]) == ("checkpoint_damaged", 3)
    assert went_on == {"step": 2 * ITERATION, "kind": "resumed", "iteration": 2, "version": versions()["rlstable"]}
    assert_same(resumed.single.state, whole.single.state)
    assert [row["step"] for row in rows(finished)] == [n * ITERATION for n in range(1, 6)]
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["3", "3.damaged", "4", "5"]


def test_run_without_an_undamaged_checkpoint_does_not_start_again(finished: Path) -> None:
    for path in finished.glob("checkpoints/*/manifest/metadata"):
        path.unlink()
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"checkpoints: none of 3 checkpoints can be read \(3: FileNotFoundError: "):
        TrainingLoop(quick(resume="auto"), finished)
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_resumed_run_logs_changed_versions(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = load_policy(finished, "latest").host["versions"]
    assert saved == {**versions(), "device": "cpu"}
    TrainingLoop(quick(4, resume="auto"), finished).run()
    assert events(finished, "versions_changed") == []
    changed = {**versions(), "jax": "99.0", "python": "4.0"}
    monkeypatch.setattr("rlstable.runner.programs.versions", lambda: changed)
    TrainingLoop(quick(5, resume="auto"), finished).run()
    [event] = events(finished, "versions_changed")
    assert {key: event[key] for key in event.keys() - {"step", "kind"}} == {
        "python": f"{saved['python']} -> 4.0",
        "jax": f"{saved['jax']} -> 99.0",
    }


def test_checkpoint_is_never_ahead_of_the_logged_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed after the save resumes without missing rows, also on a slow disk."""
    log, save = JsonLines.log, Checkpoints.save

    def slowly(self: JsonLines, *args: Any) -> None:
        time.sleep(0.05)
        log(self, *args)

    found: list[tuple[int, int]] = []

    def looked_at(self: Checkpoints, number: int, *args: Any, **fields: Any) -> Any:
        found.append((number, len((tmp_path / "metrics.jsonl").read_text().splitlines())))
        return save(self, number, *args, **fields)

    monkeypatch.setattr(JsonLines, "log", slowly)
    monkeypatch.setattr(Checkpoints, "save", looked_at)
    TrainingLoop(quick(), tmp_path).run()
    assert found == [(1, 1), (2, 2), (3, 3)]
