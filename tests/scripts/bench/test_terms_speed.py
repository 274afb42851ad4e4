"""Steps per second of a robot's task beside the same physics without terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from scripts.bench import terms

MODELS = Path(__file__).parents[2] / "robot" / "models"


def test_bare_task_keeps_actions_and_resets_alone() -> None:
    task = compose(["env=robot_velocity", f"env.xml={MODELS / 'quadruped.xml'}"]).env.task
    assert task is not None
    bare = terms.bare(task)
    assert list(bare.observations) == ["joint_positions"] and list(bare.rewards) == ["alive"]
    assert not (bare.critic_observations or bare.commands or bare.endings or bare.pushes)
    assert (bare.actions, bare.reset, bare.home) == (task.actions, task.reset, task.home)


@pytest.mark.usefixtures("quick_compile")
def test_both_sides_are_timed_in_pairs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "STEPS", 2)
    terms.main(["env=robot_swingup", f"env.xml={MODELS / 'cart_pole.xml'}", "ppo.num_envs=2"], pairs=3)
    found = json.loads(capsys.readouterr().out)
    assert (found["num_envs"], found["pairs"]) == (2, 3)
    least, most = found["interval"]
    assert 0 < least <= found["ratio"] <= most
    assert found["bare"] > 0 and found["task"] > 0


def test_environment_without_terms_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^terms: env: has no terms; choose a robot's task"):
        terms.main(["env=inverted_pendulum"])
