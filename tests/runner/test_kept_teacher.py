"""The teacher of a run: its copy in the run folder, and teachers that do not fit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from saved import checkpoints
from short_runs import short_config, trained
from toys import NamedPointMass, assert_same

from rlstable.config import Config, ConfigError
from rlstable.io.run_folder import KEPT_TEACHER
from rlstable.policy.policy import Policy, load_policy
from rlstable.runner.kept_teacher import teacher_of
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile")
NAMED = {"name": "toys:NamedPointMass"}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policy reads the privileged observation."""
    keys = dict.fromkeys(("policy_obs_key", "value_obs_key"), "privileged_state")
    return trained(tmp_path_factory.mktemp("teacher"), env=NAMED, network=keys).run_dir


def student(teacher: Path, iterations: int, **sections: Any) -> Config:
    ppo = {"teacher": str(teacher), "imitation_only": 0.25, "imitation_end": 1.0}
    total = {"total_steps": 64 * iterations, "checkpoint": {"every": 2, "asynchronous": False}}
    return short_config(env=NAMED, ppo=ppo, **total, **sections)


def test_run_resumes_with_the_same_bits_after_its_teacher_is_gone(teacher: Path, tmp_path: Path) -> None:
    gone = Path(shutil.copytree(teacher, tmp_path / "gone"))
    whole = TrainingLoop(student(gone, 4), tmp_path / "whole")
    whole.run()
    losses = [row["training/policy_loss"] for row in whole.single.log.history]
    assert losses[0] == 0.0 and 0.0 not in losses[1:]
    TrainingLoop(student(gone, 4), tmp_path / "cut", lambda step, _: step == 128).run()
    shutil.rmtree(gone)
    TrainingLoop(student(gone, 4, resume="auto"), tmp_path / "cut").run()
    (ours, _), (theirs, _) = (checkpoints(tmp_path / name)[4] for name in ("cut", "whole"))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    kept, original = load_policy(tmp_path / "cut" / KEPT_TEACHER), load_policy(teacher)
    assert_same((kept.params, kept.statistics), (original.params, original.statistics))
    # Another teacher in a resume replaces the copy.
    other = Path(shutil.copytree(tmp_path / "cut" / KEPT_TEACHER, tmp_path / "other"))
    TrainingLoop(student(other, 5, resume="auto"), tmp_path / "cut").close()
    assert load_policy(tmp_path / "cut" / KEPT_TEACHER, "latest").host["teacher"] == str(other)
    with pytest.raises(ConfigError, match=r"^ppo.teacher: .*gone.*: no checkpoint here"):
        TrainingLoop(student(gone, 5, resume="auto"), tmp_path / "cut")


def test_folder_without_a_run_is_one_line_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^ppo.teacher: .*: no checkpoint here"):
        TrainingLoop(student(tmp_path, 1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def robot(**names: list[str]) -> Any:
    return SimpleNamespace(action_size=2, names_of_policy=names)


FITS = {"privileged_state": 5}


@pytest.mark.parametrize(
    ("env", "change", "sizes", "message"),
    [
        (robot(), {"action_size": 3}, FITS, "has 3 actions, and the environment 2; choose a teacher of the same robot"),
        (robot(), {}, {"privileged_state": 6}, "reads 5 numbers in .*, and the environment has 6 in"),
        (robot(), {}, {"state": 5}, "reads 5 numbers in 'privileged_state', and the environment has 5 in 'state'"),
        (robot(), {"recurrent": "gru"}, FITS, "is recurrent; a teacher must act on one observation"),
        (robot(actions=["hip", "toe"]), {}, FITS, "has other names of the actions than the robot: knee, toe"),
        (robot(actions=["knee", "hip"]), {}, FITS, "has other names of the actions than the robot: another order"),
        (robot(privileged_state=["scan"]), {}, FITS, "other names of the privileged_state than the robot: gyro, scan"),
    ],
)  # fmt: skip
def test_teacher_of_another_robot_is_one_line(
    teacher: Path, env: Any, change: dict[str, Any], sizes: dict[str, int], message: str
) -> None:
    policy = load_policy(teacher)
    own = policy.networks.config.model_copy(update={"recurrent": change.get("recurrent")})
    networks = dataclasses.replace(policy.networks, action_size=change.get("action_size", 2), config=own)
    host = {"policy": {"names": {"actions": ["hip", "knee"], "privileged_state": ["gyro"]}}}
    changed = dataclasses.replace(policy, networks=networks, host=host)
    with pytest.raises(ConfigError, match=f"^ppo.teacher: .*{message}") as caught:
        teacher_of(changed, env, 1, {key: np.zeros(size) for key, size in sizes.items()})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("size", "history", "fits"), [(5, 1, True), (15, 3, True), (15, 1, False), (4, 1, False)])
def test_teacher_reads_the_newest_of_stacked_observations(teacher: Path, size: int, history: int, fits: bool) -> None:
    policy: Policy = load_policy(teacher)
    for observation in ({"privileged_state": np.zeros(size)}, np.zeros(size)):
        if fits:
            assert teacher_of(policy, NamedPointMass(), history, observation).statistics.mean.shape == (5,)
            continue
        with pytest.raises(ConfigError, match=r"^ppo.teacher: .* reads 5 numbers in 'privileged_state', and the env"):
            teacher_of(policy, NamedPointMass(), history, observation)
