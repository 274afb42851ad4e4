"""The copy of a robot's model in the run folder: the run continues without the user's file."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from commands import SIZES, typed
from saved import events, lines
from toys import assert_same

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.export.function import policy_function
from rlstable.io import kept_model
from rlstable.io.run_folder import KEPT_MODEL
from rlstable.policy.playback import evaluate_run
from rlstable.policy.saved_run import open_run
from rlstable.robot.files import bundle
from rlstable.train import main

pytestmark = pytest.mark.usefixtures("quick_compile")
ARM = Path(__file__).parents[1] / "robot" / "models" / "arm.xml"


def train(*words: str) -> int:
    return typed(main, *words, "eval.num_evals=0", "devices=1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(ARM, folder)
    return folder / ARM.name


@pytest.fixture(scope="module")
def run_dir(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations."""
    folder = tmp_path_factory.mktemp("run")
    words = ["env=robot_reach", f"env.xml={source}", "ppo=default", *SIZES, "total_steps=128", "guards=off"]
    assert train(*words, f"hydra.run.dir={folder}") == 0
    return folder


def copied(run_dir: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run_dir, folder / "run"))


def test_run_folder_holds_the_model(run_dir: Path, source: Path) -> None:
    assert (run_dir / KEPT_MODEL).read_bytes() == bundle(str(source))
    assert KEPT_MODEL not in (run_dir / "config.yaml").read_text()


def test_run_of_a_robot_reports_each_term_of_its_reward(run_dir: Path) -> None:
    names = {name for row in lines(run_dir / "metrics.jsonl") for name in row}
    assert {f"episode/reward/{term}" for term in ("reach", "joint_speed", "action_rate")} <= names
    assert "Reward by term" in (run_dir / "report.html").read_text()


def test_disk_without_room_for_the_model_is_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_model, "write_atomically", full)
    config = compose(["env=robot_reach", f"env.xml={source}"])
    with pytest.raises(ConfigError, match=r"cannot write .*model.zip: No space left on device; make room there, or"):
        kept_model.keep(config.env, tmp_path)


def test_run_with_a_changed_file_resumes_as_if_it_had_not_changed(
    run_dir: Path, source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = copied(run_dir, tmp_path / "first")
    second = copied(run_dir, tmp_path / "second")
    assert train(f"resume={first}", "total_steps=256") == 0
    said = capfd.readouterr().out
    assert "task        robot_reach with arm.xml, physics C MuJoCo" in said and "has changed" not in said
    before = source.read_text()
    source.write_text(before.replace("0.25", "0.3"))
    try:
        assert train(f"resume={second}", "total_steps=256") == 0
    finally:
        source.write_text(before)
    assert f"env.xml: {source} has changed since this run started, and the run continues with" in capfd.readouterr().out
    assert not events(second, "environments_redrawn")
    assert_same(*(open_run(folder, "latest").policy.params for folder in (first, second)))


def test_policy_plays_in_a_moved_folder_after_the_file_is_gone(
    run_dir: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(run_dir, tmp_path)
    before = source.read_text()
    source.unlink()
    try:
        run = open_run(folder)
        assert run.config.env.model_file == str(folder / KEPT_MODEL)
        assert len(evaluate_run(run, 2).valid) == 2
        (folder / KEPT_MODEL).unlink()
        with pytest.raises(ConfigError, match=rf"^env.xml: there is no file {source}"):
            evaluate_run(open_run(folder), 2)
    finally:
        source.write_text(before)


def test_contract_of_a_policy_is_of_the_kept_model(run_dir: Path, source: Path) -> None:
    before, first = source.read_text(), policy_function(open_run(run_dir)).metadata["model_hash"]
    source.write_text(before.replace("0.25", "0.3"))
    try:
        assert policy_function(open_run(run_dir)).metadata["model_hash"] == first
    finally:
        source.write_text(before)


def test_other_file_in_a_resume_is_trained_and_kept(run_dir: Path, tmp_path: Path) -> None:
    folder = copied(run_dir, tmp_path)
    other = tmp_path / "longer.xml"
    other.write_text(ARM.read_text().replace("0.25", "0.3"))
    assert train(f"resume={folder}", f"env.xml={other}", "total_steps=192") == 0
    assert events(folder, "environments_redrawn")
    assert (folder / KEPT_MODEL).read_bytes() == bundle(str(other))
