"""Recordings of the current policy: pages while a run trains, without effect on its numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from saved import events
from short_runs import short_config
from toys import GUARDS_OFF, assert_same

from rlstable.config import Config, ConfigError
from rlstable.listeners import listeners_of
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def config(every: int, **sections: Any) -> Config:
    """A run of four iterations of 64 steps, each with an evaluation."""
    env = {"name": "ball:Stick", "backend": "native", "episode_length": 40}
    defaults = {"total_steps": 256, "env": env, "eval": {"num_evals": 4, "num_envs": 2}, "guards": GUARDS_OFF}
    return short_config(**defaults | {"render": {"every": every, "seconds": 0.1}} | sections)


def trained(folder: Path, config: Config) -> TrainingLoop:
    loop = TrainingLoop(config, folder, listeners=listeners_of(config.render, config.logging))
    result = loop.run()
    assert result.stop_reason.name == "completed"
    return loop


def recorded_steps(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "episodes").glob("*.html"))


Recorded = tuple[Path, TrainingLoop]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return folder, trained(folder, config(2))


def test_every_second_evaluation_is_recorded_in_a_page_of_the_configured_length(recorded: Recorded) -> None:
    folder, _ = recorded
    assert recorded_steps(folder) == [128, 256]
    text = (folder / "episodes" / "256.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert data["title"] == "ball:Stick, native, step 256"
    assert [len(episode["rewards"]) for episode in data["episodes"]] == [5]  # 0.1 s of 0.02 s each
    assert [event["file"] for event in events(folder, "episode_recorded")] == ["episodes/128.html", "episodes/256.html"]


def test_report_at_the_end_of_a_run_links_its_last_recording(recorded: Recorded) -> None:
    text = (recorded[0] / "report.html").read_text()
    assert text.index('href="episodes/256.html">step 256<') < text.index('href="episodes/128.html"')


def test_training_computes_the_same_numbers_with_and_without_recordings(recorded: Recorded, tmp_path: Path) -> None:
    without = trained(tmp_path / "run", config(0))
    assert not (tmp_path / "run" / "episodes").exists()
    assert_same(recorded[1].single.state, without.single.state)


def test_environment_without_a_model_is_refused_before_the_run_has_a_folder(tmp_path: Path) -> None:
    settings = config(1, env={"name": "toys:PointMass"})
    with pytest.raises(ConfigError, match=r"^render\.every: toys:PointMass has no MuJoCo model to draw; set render\.e"):
        TrainingLoop(settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("every", "evals"), [(1, 0), (5, 4)])
def test_more_evaluations_between_recordings_than_there_are_is_an_error(every: int, evals: int) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^render\.every: {every} must not exceed eval\.num_evals={evals}, because evaluations record$",
    ):
        config(every, eval={"num_evals": evals})
