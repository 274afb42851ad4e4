"""Settings that differ from the checkpoint are logged when a run is resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import short_runs
import yaml
from saved import events

from rlstable.cli.compose import compose
from rlstable.policy import load_policy
from rlstable.report.page import page
from rlstable.report.run_record import read_record
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.resume import changes
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


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
    html = page([read_record(folder)])
    assert "<h2>Changed settings</h2>" in html
    assert "<code>ppo.num_resets_per_eval</code></td><td><code>0</code></td><td><code>1</code></td>" in html
    assert load_policy(folder, "latest").host["config"]["ppo"]["num_resets_per_eval"] == 1
    # A change is logged once, not at every later resume.
    TrainingLoop(compose([f"resume={folder}", "total_steps=192"]), folder).run()
    assert [event["key"] for event in told(folder)] == ["ppo.num_resets_per_eval", "total_steps", "total_steps"]


def test_changed_folders_and_loggers_are_not_logged(folder: Path) -> None:
    saved = load_policy(folder, "latest").host["config"]
    logging = {"console": "plain", "wandb": {"name": "other"}}
    other = short_runs.short_config(**ONE, resume="auto", compile_cache=None, logging=logging)
    assert changes(saved, other) == []
    html = page([read_record(folder)])
    assert "Changed settings" not in html
