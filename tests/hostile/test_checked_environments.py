"""Environments that cannot be trained as they are written end with one line before anything compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import users
from hostile.users import LargeArray, SlashInAName
from saved import events
from short_runs import short_config

import rlstable
from rlstable.config import ConfigError
from rlstable.envs.interface import check
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result
from rlstable.supervise.stop_reasons import StopReason

DIFFERS = "{} differs between two traces: a Python counter, np.random or the time never changes in the compiled"
PYTHON_STATE = {
    users.Counter: DIFFERS.format("step"),
    users.ClassCounter: DIFFERS.format("reset"),
    users.NumpyNoise: DIFFERS.format("step"),
    users.NumpyGoal: DIFFERS.format("reset"),
    users.TracedGoal: "step reads a value that an earlier call of reset or step traced; keep it in info",
}


@pytest.mark.parametrize("kind", PYTHON_STATE, ids=lambda kind: kind.__name__)
def test_python_state_of_an_environment_is_one_line(kind: type) -> None:
    with pytest.raises(ConfigError) as caught:
        check(kind(), "my:Env")
    assert str(caught.value).startswith(f"env.name: my:Env: {PYTHON_STATE[kind]}")


@pytest.mark.parametrize("kind", [users.LazyCache, users.History])
def test_python_state_that_changes_no_program_is_no_mistake(kind: type) -> None:
    """A cache that the first call fills, and a list that no call reads."""
    check(kind(), "my:Env")


def test_environment_that_cannot_be_mapped_is_one_line_with_the_location() -> None:
    with pytest.raises(
        ConfigError, match=r"jax\.vmap of reset and step raises .*vmap_method=None.* \(.*users\.py:\d+\)$"
    ):
        check(users.Host(), "my:Env")


@pytest.mark.parametrize(("part", "kind"), [("nested", "dict"), ("scalar", "float32[]"), ("picture", "uint8[4,4,3]")])
def test_only_the_parts_of_an_observation_that_the_networks_read_must_be_vectors(part: str, kind: str) -> None:
    network = short_config().network
    check(users.Named(part=part), "my:Env", network)
    with pytest.raises(ConfigError) as caught:
        check(users.Named(part=part, policy_reads=True), "my:Env", network)
    assert f'my:Env: reset returns obs["state"] as {kind}; the networks read a vector' in str(caught.value)


def large_constants(folder: Path) -> list[int]:
    return [event["megabytes"] for event in events(folder, "large_constants")]


@pytest.mark.usefixtures("quick_compile")
def test_environment_without_physics_trains(tmp_path: Path) -> None:
    config = short_config(env={"name": "users:InInfo"}, eval={"num_evals": 1, "num_envs": 2})
    assert TrainingLoop(config, tmp_path).run().stop_reason is StopReason.completed
    assert large_constants(tmp_path) == []  # only large arrays are reported


SMALL = [
    *("env.episode_length=20", "network=small", "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2"),
    *("ppo.unroll_length=4", "eval.num_envs=2", "eval.num_evals=1", "logging=quiet", "devices=1", "guards=off"),
]


def fit(env: Any, folder: Path, **keys: Any) -> Result:
    return rlstable.fit(env, run_dir=folder, overrides=SMALL, **keys)


@pytest.mark.usefixtures("quick_compile")
def test_large_arrays_of_an_environment_are_reported_once(tmp_path: Path) -> None:
    fit(LargeArray(), tmp_path, total_steps=64)
    assert large_constants(tmp_path) == [64]


@pytest.mark.usefixtures("quick_compile", "shared_programs")
def test_names_with_slashes_are_saved_and_resumed(tmp_path: Path) -> None:
    fit(SlashInAName(), tmp_path, total_steps=64)
    resumed = fit(SlashInAName(), tmp_path, total_steps=128, resume="auto")
    assert (resumed.stop_reason.name, resumed.step) == ("completed", 128)
