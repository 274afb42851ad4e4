"""Names with slashes and large arrays in an environment are trained, or one line before anything compiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile.users import Cart, LargeArray, SlashInAName

import rlstable
from rlstable.runner.result import Result

pytestmark = pytest.mark.usefixtures("quick_compile")
TINY = [
    *("env.episode_length=20", "network=small", "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2"),
    *("ppo.unroll_length=4", "eval.num_envs=2", "eval.num_evals=1", "logging=quiet", "devices=1"),
]


def fit(env: Any, folder: Path, **keys: Any) -> Result:
    return rlstable.fit(env, run_dir=folder, overrides=TINY, **keys)


def test_names_with_slashes_are_saved_and_resumed(tmp_path: Path) -> None:
    fit(SlashInAName(), tmp_path, total_steps=64)
    resumed = fit(SlashInAName(), tmp_path, total_steps=128, resume="auto")
    assert (resumed.stop_reason.name, resumed.step) == ("completed", 128)


def test_names_that_a_checkpoint_cannot_tell_apart_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(rlstable.ConfigError) as error:
        fit(SlashInAName(clash=True), tmp_path, total_steps=64)
    assert str(error.value) == (
        "env.name: the state of hostile.users:SlashInAName has two arrays info/gait/left, because / separates names; "
        "rename one of them"
    )


def test_large_arrays_of_an_environment_are_reported_once(tmp_path: Path) -> None:
    def reported(env: Any, folder: Path) -> list[int]:
        fit(env, folder, total_steps=64)
        events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        return [event["megabytes"] for event in events if event["kind"] == "large_constants"]

    assert reported(LargeArray(), tmp_path / "large") == [64]
    assert reported(Cart(), tmp_path / "small") == []
