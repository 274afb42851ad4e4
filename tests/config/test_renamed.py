"""Renamed keys: typed by the user, saved in run folders, and given together with their new names."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from rlstable import load_policy
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.config.renamed import updated, with_new_names
from rlstable.io.run_folder import read_result
from rlstable.policy.saved_run import open_run
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile")

# A run and a fleet of two seeds, 2,560 steps of env=fast each, saved by rlstable 0.1.0 before its keys were renamed.
ARCHIVE = Path(__file__).parents[1] / "data" / "runs_of_the_version_before.tar.gz"


@pytest.mark.parametrize(
    ("typed", "now"),
    [
        ("sinks=wandb", "logging=wandb"),
        ("sinks.console=off", "logging.console=off"),
        ("+sinks.wandb.tags=[a=b]", "+logging.wandb.tags=[a=b]"),
        ("device=cpu", "recipe_for=cpu"),
        ("guards.state.patience=1", "guards.finite_state.patience=1"),
        ("guards.transition={enabled: false}", "guards.finite_samples={enabled: false}"),
    ],
)
def test_renamed_key_is_replaced_with_a_warning_that_names_the_new_key(typed: str, now: str) -> None:
    old = re.match(r"(guards\.)?\w+", typed.lstrip("+"))[0]  # type: ignore[index]
    words, (warning,) = with_new_names(["seed=1", typed])
    assert words == ["seed=1", now]
    assert warning.startswith(f"{old} was renamed to ") and now in warning


def test_words_without_a_renamed_key_do_not_change() -> None:
    words = ["devices=1", "network.sinks=1", "guards.storm.patience=1", "-m", "--cfg", "seed=sinks"]
    assert with_new_names(words) == (words, [])


def test_old_and_new_key_together_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^sinks: was renamed to logging, and both are set; keep logging$"):
        with_new_names(["logging=quiet", "sinks=wandb"])
    with pytest.raises(ConfigError, match=r"^guards\.update: was renamed to guards\.finite_update, and both are set"):
        with_new_names(["guards.finite_update.patience=1", "guards.update.enabled=true"])


def test_composed_configuration_has_the_value_of_the_old_key(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose(["sinks=quiet", "device=cpu", "env=humanoid", "sinks.log_every=7"])
    assert (config.logging.console, config.logging.log_every, config.recipe_for) == ("off", 7, "cpu")
    said = capsys.readouterr().err.splitlines()
    assert [line.split(";")[0] for line in said] == [
        "rlstable: sinks was renamed to logging", "rlstable: device was renamed to recipe_for",
    ]  # fmt: skip


def test_warm_start_of_an_old_run_is_dropped_if_it_was_off_and_rejected_if_on() -> None:
    off, on = ({"supervise": {"warm_start": {"enabled": enabled}, "max_wall_time": 1}} for enabled in (False, True))
    assert updated(off) == {"supervise": {"max_wall_time": 1}}
    with pytest.raises(ConfigError, match=r"^supervise\.warm_start: this version has no warm start"):
        updated(on)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize("folder", ["fleet_of_0_1_0/seed-1"])
def test_policy_of_version_0_1_0_loads(runs: Path, folder: str) -> None:
    policy, run = load_policy(runs / folder, "latest"), open_run(runs / folder, "latest")
    assert np.isfinite(policy.act(np.zeros(2, np.float32))).all()
    assert (run.step, run.config.logging.console, run.config.recipe_for) == (2560, "plain", "cpu")


@pytest.mark.parametrize(
    ("folder", "seeds"), [("run_of_0_1_0", 1), pytest.param("fleet_of_0_1_0", 2, marks=pytest.mark.slow)]
)
def test_run_folder_of_version_0_1_0_resumes(
    runs: Path, folder: str, seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose([f"resume={runs / folder}", "total_steps=3200", "logging.console=off", "devices=1"])
    assert TrainingLoop(config, runs / folder).run().stop_reason.name == "completed"
    for seed in range(seeds):
        each = runs / folder if seeds == 1 else runs / folder / f"seed-{seed}"
        assert (read_result(each) or {})["step"] == 3200
    assert "renamed" not in capsys.readouterr().err
