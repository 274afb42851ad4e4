"""Evaluation of a saved run: its numbers, its output, and errors of damaged folders."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from commands import exit_code
from running import ITERATION, train
from toys import PointMass

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.evaluate import main
from rlstable.io.run_folder import write_config
from rlstable.policy import saved_run
from rlstable.policy.playback import evaluate_run
from rlstable.policy.policy import load_policy
from rlstable.policy.saved_run import open_run
from rlstable.policy.statistics import estimate

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return train(folder, total_steps=2 * ITERATION, eval={"num_evals": 1, "num_envs": 2}).run_dir


@pytest.fixture(scope="module")
def faulty_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose simulations become bad in most episodes."""
    env = {"kwargs": {"fault": "physics", "probability": 0.1}}
    return train(tmp_path_factory.mktemp("faulty"), total_steps=2 * ITERATION, env=env).run_dir


run = functools.partial(exit_code, main)


def test_json_of_an_evaluation_has_the_numbers_of_its_episodes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"run={run_dir}", "episodes=40", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["env"], said["backend"], said["iteration"], said["step"]) == ("toys:PointMass", "toy", 2, 128)
    assert (said["episodes"], len(said["returns"]), len(said["lengths"])) == (40, 40, 40)
    assert said["return"]["mean"] == estimate(said["returns"])._asdict()
    assert said["return"]["iqm"]["low"] < said["return"]["iqm"]["value"] < said["return"]["iqm"]["high"]
    assert said["length"] == np.mean(said["lengths"]) <= 12
    assert said["aborted_share"] == 0.0
    assert list(said["metrics"]) == ["distance"]


def test_episodes_depend_on_the_seed_and_on_sampling(run_dir: Path) -> None:
    saved = open_run(run_dir)
    first, again, other = (evaluate_run(saved, 8, seed=seed).episodes.metrics["reward"] for seed in (1, 1, 2))
    sampled = evaluate_run(saved, 8, deterministic=False, seed=1).episodes.metrics["reward"]
    np.testing.assert_array_equal(first, again)
    assert (first != other).all() and (first != sampled).all()


def test_aborted_episodes_are_reported_and_left_out(faulty_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worth = evaluate_run(open_run(faulty_dir), 64)
    data = worth.as_data()
    assert 0 < worth.aborted < 64
    assert data["aborted_share"] == worth.aborted / 64
    assert data["returns"].count(None) == worth.aborted
    assert data["return"]["mean"]["value"] == pytest.approx(np.mean([x for x in data["returns"] if x is not None]))
    assert run(f"run={faulty_dir}", "episodes=64") == 0
    assert f"{worth.aborted} of 64 episodes were aborted, and left out" in capsys.readouterr().out


def test_evaluation_with_every_episode_aborted_has_no_return(faulty_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(faulty_dir, folder)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(text.replace("probability: 0.1", "probability: 1.0"))
    worth = evaluate_run(open_run(folder, trust=True), 4)
    assert worth.aborted == 4
    assert worth.as_data()["return"] is None
    assert worth.lines() == ["4 of 4 episodes were aborted: no episode has a return"]


def test_evaluation_prints_a_table(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"run={run_dir}", "which=latest", "episodes=10") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    title = (
        "toys:PointMass, toy: 10 episodes of the mean action, checkpoint of iteration 2, step 128, the confirmed best"
    )
    assert title in lines
    assert "95 % interval" in printed.out and "interquartile mean" in printed.out
    assert lines[-1].strip() == "0 of 10 episodes were aborted"
    assert printed.err.startswith("playing 10 episodes")


@pytest.fixture
def copied(run_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(run_dir, folder)
    return folder


def test_configuration_of_another_version_is_an_error(copied: Path) -> None:
    with (copied / "config.yaml").open("a") as file:
        file.write("warp_drive: true\n")
    with pytest.raises(ConfigError, match=r"config\.yaml is not of this version, rlstable .*: warp_drive: unknown key"):
        open_run(copied)


def test_policy_of_a_class_that_has_changed_is_one_line_with_both_numbers(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (copied / "config.yaml").read_text()
    (copied / "config.yaml").write_text(text.replace("toys:PointMass", "test_evaluate:Longer"))
    assert run(f"run={copied}", "episodes=2", "trust=true") == 2
    assert capsys.readouterr().err.endswith(
        "does not fit the policy: the class gives 5 numbers in obs, the policy reads 4; the class takes 3 actions, "
        "the policy gives 2; play the policy with the class that trained it\n"
    )


class Longer(PointMass):
    """A point mass with a further observation and action."""

    observation_size, action_size = 5, 3

    def _observation(self, physics: Any) -> Any:
        return jnp.append(super()._observation(physics), 0.0)

    def step(self, state: Any, action: Any) -> Any:
        return super().step(state, action[:2])


def test_policy_is_evaluated_at_the_precision_and_backend_of_its_training(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the precision that the run had raised, and on the backend that `auto` had chosen."""
    policy = load_policy(run_dir)
    host = policy.host | {"level": ["x64", "float32"], "backend": "native"}
    monkeypatch.setattr(saved_run, "load_policy", lambda *_: dataclasses.replace(policy, host=host))
    (tmp_path / "checkpoints").mkdir()
    for words, backend in ((), "native"), (("env.backend=mjx",), "mjx"):
        write_config(tmp_path, compose(["env=inverted_pendulum", *words]).model_dump(mode="json"))
        found = open_run(tmp_path).config
        assert (found.precision.matmul, found.precision.network, found.env.backend) == ("x64", "float32", backend)
