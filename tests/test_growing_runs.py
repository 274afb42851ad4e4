"""Runs that begin small, and runs that go on with another number of environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import tiny_config

from rlstable.config import Config
from rlstable.runner.runner import Runner
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile")
ITERATION = 64  # environment steps: 16 unrolls of 4


def config(total: int, **sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "guards": {}, "devices": 1, "total_steps": total * ITERATION, "sinks": {"console": "off"},
        "eval": {"num_evals": 2, "num_envs": 4}, "env": {"episode_length": 8},
        "checkpoint": {"every": 1, "asynchronous": False},
    }  # fmt: skip
    return tiny_config(**defaults | sections)


def small(total: int, **sections: Any) -> Config:
    warm = {"enabled": True, "num_envs": 0.5, "episode_length": 0.5, "grow_after": 3}
    return config(total, supervise={"warm_start": warm, "recovery": {"enabled": True}}, **sections)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    runner = Runner(small(6), tmp_path_factory.mktemp("grown"))
    assert runner.state.env_state.done.shape == (4,)
    assert runner.run().ending is StopReason.completed
    return runner


def test_it_begins_small_and_grows(grown: Runner) -> None:
    assert grown.state.env_state.done.shape == (8,)
    (event,) = events(grown.run_dir, "grown")
    assert (event["step"], event["num_envs"], event["episode_length"]) == (3 * ITERATION, 8, 8)
    # Batches are what they were, and so are the steps that are counted.
    assert [row["step"] for row in grown.history] == [ITERATION * n for n in range(1, 7)]


def test_evaluation_has_whole_episodes_from_the_beginning(grown: Runner) -> None:
    lengths = [row["eval/avg_episode_length"] for row in grown.history if "eval/avg_episode_length" in row]
    assert lengths == [8.0, 8.0]


def test_episodes_are_shorter_at_first(grown: Runner, tmp_path: Path) -> None:
    short = Runner(small(3), tmp_path)
    assert short.supervisor.assembly.env.episode_length == 4
    assert grown.supervisor.assembly.env.episode_length == 8


@pytest.mark.parametrize("stopped", [2, 3, 4], ids=["while small", "as it grows", "grown"])
def test_a_resume_is_exact(grown: Runner, tmp_path: Path, stopped: int) -> None:
    Runner(small(6), tmp_path, lambda step, _: step == stopped * ITERATION).run()
    resumed = Runner(small(6, resume="auto"), tmp_path)
    assert resumed.step == stopped * ITERATION
    resumed.run()
    for ours, theirs in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(grown.state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.slow
def test_it_grows_on_two_devices(tmp_path: Path) -> None:
    runner = Runner(small(4, devices=2), tmp_path)
    assert runner.run().ending is StopReason.completed
    assert runner.state.env_state.done.shape == (8,)


def test_a_run_goes_on_with_more_environments_or_fewer(tmp_path: Path) -> None:
    """They are drawn anew, and everything that was learnt stays."""
    first = Runner(config(2), tmp_path)
    first.run()
    ppo = {**config(2).ppo.model_dump(), "num_envs": 16}
    second = Runner(config(4, resume="auto", ppo=ppo), tmp_path)
    (event,) = events(tmp_path, "environments_redrawn")
    assert (event["num_envs"], event["step"]) == (16, 2 * ITERATION)
    for ours, theirs in zip(jax.tree.leaves(second.state.params), jax.tree.leaves(first.state.params), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert second.run().ending is StopReason.completed
    assert second.state.env_state.done.shape == (16,)
    assert second.history[-1]["step"] == 4 * ITERATION
