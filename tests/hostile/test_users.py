"""Environments as users write them are trained, and learned with the default guards as well as without guards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import users
from saved import events
from toys import TINY

import rlstable
from rlstable.supervise.recovery import Recovery

SMALL = {
    "num_envs": 32, "batch_size": 32, "num_minibatches": 8, "unroll_length": 16, "learning_rate": 1e-3,
}  # fmt: skip
SEEDS = 3
SHORT = [*TINY[3:-2], "eval.num_envs=2", "eval.num_evals=1", "logging=quiet", "devices=1", "guards=off"]


@pytest.mark.usefixtures("quick_compile")  # and before the tests that share programs, in which no array is looked for
@pytest.mark.parametrize(("kind", "reported"), [(users.InInfo, []), (users.LargeArray, [64])])
def test_environment_without_physics_trains_and_large_arrays_are_reported_once(
    kind: type, reported: list[int], tmp_path: Path
) -> None:
    result = rlstable.fit(kind(), run_dir=tmp_path, overrides=SHORT, total_steps=64)
    assert result.stop_reason.name == "completed"
    assert [event["megabytes"] for event in events(tmp_path, "large_constants")] == reported


@pytest.mark.usefixtures("quick_compile", "shared_programs")
def test_names_with_slashes_are_saved_and_resumed(tmp_path: Path) -> None:
    rlstable.fit(users.SlashInAName(), run_dir=tmp_path, overrides=SHORT, total_steps=64)
    resumed = rlstable.fit(users.SlashInAName(), run_dir=tmp_path, overrides=SHORT, total_steps=128, resume="auto")
    assert (resumed.stop_reason.name, resumed.step) == ("completed", 128)


def returns_of(folder: Path, name: str, guards: str, **keys: Any) -> list[float]:
    """Returns of the last evaluation of three seeds after 400,000 steps."""
    rlstable.fit(
        f"users:{name}", run_dir=folder, seeds=SEEDS, guards=guards, total_steps=400_000, network="small", ppo=SMALL,
        devices=1, logging="quiet", checkpoint="off", overrides=["ppo=default", "env.episode_length=100"], **keys,
    )  # fmt: skip
    return [json.loads((folder / f"seed-{seed}" / "result.json").read_text())["last_return"] for seed in range(SEEDS)]


@pytest.mark.slow
def test_command_that_begins_late_is_learned_with_guards(tmp_path: Path) -> None:
    """The command is constant for 3,000 steps of every environment. Once the bounds forbade the correction for ever."""
    evaluation = {"num_envs": 16, "env_kwargs": {"late": 1}}
    returns = returns_of(tmp_path / "run", "LateCommand", "default", eval=evaluation)
    assert min(returns) > 80.0, returns
    for seed in range(SEEDS):
        run = tmp_path / "run" / f"seed-{seed}"
        assert not events(run, "rolled_back", "guard_tripped")
        (sign,) = [event for event in events(run, "sign") if event["sign"] == "observation_began_to_vary"]
        assert sign["text"].startswith("element 2 of the observation had been constant")


BURST = (
    "guards=off", "guards.policy.enabled=true", "guards.policy.patience=2", "supervise.recovery.every=1",
    "ppo.normalize_observations=false", "ppo.learning_rate=1e-2", "total_steps=3840", "env.episode_length=20",
)  # fmt: skip


def burst(folder: Path) -> str:
    """Trains through the burst, at the same step of each environment after every reset; returns the stop reason."""
    return rlstable.fit("users:Burst", run_dir=folder, overrides=[*TINY[1:2], *TINY[3:], *BURST]).stop_reason.name


@pytest.mark.usefixtures("quick_compile", "shared_programs")
def test_failure_that_lies_in_the_data_is_rolled_back_once_and_then_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert burst(tmp_path / "passes") == "completed"
    assert [event["cause"] for event in events(tmp_path / "passes", "rolled_back")] == ["policy_diverged"]
    (sign,) = [event for event in events(tmp_path / "passes", "sign") if event["sign"] == "failure_repeats"]
    assert sign["text"].startswith("policy_diverged came again ")
    monkeypatch.setattr(Recovery, "repeats", lambda *_: False)
    burst(tmp_path / "repeats")
    assert len(events(tmp_path / "repeats", "rolled_back")) > 3
