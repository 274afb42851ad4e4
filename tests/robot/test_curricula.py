"""Curricula: values that change with the steps trained, exactly so through a resume; and resets from keyframes."""

from __future__ import annotations

import contextlib
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import SIZES, typed
from moments import MODELS, config, environment
from toys import assert_same

from rlstable.config import Config, load
from rlstable.config.curriculum import Curriculum
from rlstable.config.schema import INT32_MAX
from rlstable.device.trees import TRAINED_STEPS
from rlstable.envs.load import load as load_env
from rlstable.policy.saved_run import open_run
from rlstable.robot.environment import PAST
from rlstable.runner.loop import TrainingLoop
from rlstable.train import main

pytestmark = pytest.mark.usefixtures("quick_compile")
FORWARD = "env.task.commands.velocity.forward=[[0.0, 0.2], [2.0, 3.0], 1000]"
OTHERS = ("env.task.commands.velocity.sideways=[0, 0]", "+env.task.commands.velocity.stand=0")
SLOPE = "+env.task.observations.{}.noise=[0, 2, 100]"


@functools.cache
def programs(task: str, *words: str) -> tuple[Any, Any]:
    """Compiled reset and step of an environment of the quadruped on C MuJoCo."""
    env = load_env(config(task, "quadruped", "env.backend=native", *words).env).env
    return jax.jit(env.reset), jax.jit(env.step)


def after_steps(trained: int, count: int, task: str, *words: str) -> list[Any]:
    """The states of an episode, first state included, of which `trained` steps were trained before."""
    reset, step = programs(task, *words)
    states = [reset(jax.random.PRNGKey(0))]
    for _ in range(count):
        info = {**states[-1].info, TRAINED_STEPS: jnp.int32(trained)}
        states.append(step(states[-1].replace(info=info), jnp.zeros(12)))
    return states


@pytest.mark.parametrize(("share", "expected"), [(0.0, (0.0, 1.0)), (0.25, (0.5, 2.0)), (1.0, (2.0, 5.0))])
def test_range_moves_linearly_from_start_to_end(share: float, expected: tuple[float, float]) -> None:
    assert Curriculum((0.0, 1.0), (2.0, 5.0), 10).at(share) == expected


@pytest.mark.parametrize(("trained", "low", "high"), [(0, 0.0, 0.2), (500, 1.0, 1.6), (5000, 2.0, 3.0)])
def test_command_is_drawn_from_the_range_of_the_steps_trained(trained: int, low: float, high: float) -> None:
    forward = float(after_steps(trained, 1, "robot_velocity", FORWARD, *OTHERS)[1].info[PAST].command["velocity"][0])
    assert low <= forward <= high


def test_command_outside_of_training_has_the_last_range() -> None:
    first = programs("robot_velocity", FORWARD, *OTHERS)[0](jax.random.PRNGKey(1))
    assert int(first.info[TRAINED_STEPS]) == INT32_MAX
    assert 2.0 <= float(first.info[PAST].command["velocity"][0]) <= 3.0


def test_noise_grows_with_the_steps_trained() -> None:
    none, half = (after_steps(n, 1, "robot", SLOPE.format("joint_positions"))[1] for n in (0, 50))
    difference = np.abs(np.asarray(half.obs - none.obs))
    assert 0.5 < difference[:12].max() <= 1.0
    np.testing.assert_array_equal(difference[12:], 0.0)


def test_pushes_grow_with_the_steps_trained() -> None:
    words = ("env.task.pushes={every: 0.02, speed: [0, 4, 100]}",)
    speeds = [
        float(np.linalg.norm(state.data.qvel[:2]))
        for state in (after_steps(n, 2, "robot", *words)[2] for n in (0, 100))
    ]
    assert speeds[0] < 0.5 < 2.0 < speeds[1]


def test_curriculum_survives_the_configuration_of_a_run_folder() -> None:
    settings = config("robot", "quadruped", "env.task.pushes={every: 1, speed: [0, 4, 1e2]}").model_dump(mode="json")
    assert settings["env"]["task"]["pushes"] == {"every": 1.0, "speed": [0.0, 4.0, 100]}
    task = load(settings).env.task
    assert task is not None and task.pushes is not None and task.pushes.speed == Curriculum(0.0, 4.0, 100)


# --- training


def training(*words: str) -> Config:
    small = ["ppo=default", *SIZES, "eval.num_evals=0", "devices=1", "logging.console=off"]
    return config("robot_velocity", "quadruped", *small, FORWARD, *words)


def test_training_sets_the_steps_trained_before_each_iteration(tmp_path: Path) -> None:
    settings = training("total_steps=192", "env.episode_length=50", "guards=off")
    with contextlib.closing(TrainingLoop(settings, tmp_path / "run")) as loop:
        for before in (0, 64, 128):
            loop.advance()
            seen = np.asarray(loop.single.state.env_state.info[TRAINED_STEPS])
            assert set(seen.tolist()) <= {before, INT32_MAX} and before in seen  # the latter of a fresh first state


@pytest.mark.slow
def test_curriculum_goes_back_with_a_rollback(tmp_path: Path) -> None:
    fault = ("fault.site=gradient", "fault.probability=1", "fault.start=3", "fault.iterations=2")
    patience = ("guards.storm.patience=2", "guards.finite_update.patience=2", "supervise.recovery.every=1")
    settings, seen = training("total_steps=448", "env.episode_length=50", *fault, *patience), []
    with contextlib.closing(TrainingLoop(settings, tmp_path / "run")) as loop:
        for _ in range(9):
            loop.advance()
            seen.append(int(np.asarray(loop.single.state.env_state.info[TRAINED_STEPS]).min()))
    # The fifth iteration fails, and the environments begin again with the state after the third.
    assert seen == [0, 64, 128, 192, INT32_MAX, 192, 256, 320, 384]


@pytest.mark.slow
def test_curriculum_continues_exactly_after_a_resume(tmp_path: Path) -> None:
    words = ["env=robot_velocity", f"env.xml={MODELS / 'quadruped.xml'}", "ppo=default", *SIZES, FORWARD, "devices=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words += ["eval.num_evals=0", "env.task.rewards.short_steps=null"]  # its curriculum ends with the run
    assert typed(main, *words, "total_steps=256", f"hydra.run.dir={whole}") == 0
    assert typed(main, *words, "total_steps=128", f"hydra.run.dir={parts}") == 0
    assert typed(main, f"resume={parts}", "total_steps=256") == 0
    assert_same(*(open_run(folder, "latest").policy.params for folder in (whole, parts)))


# --- resets


@pytest.fixture
def lying(tmp_path: Path) -> Path:
    """The quadruped with a second keyframe, in which it lies."""
    shutil.copy(MODELS / "quadruped.xml", tmp_path)
    path = tmp_path / "quadruped.xml"
    lies = " ".join(["0 0 0.1 1 0 0 0", *["0 1.2 -2.6"] * 4])
    path.write_text(path.read_text().replace("</keyframe>", f'<key name="lying" qpos="{lies}"/></keyframe>'))
    return path


def reset_words(names: str) -> tuple[str, str]:
    return "env.task.reset.home=null", f"+env.task.reset.keyframes={{names: {names}, position: 0, velocity: 0}}"


def test_episodes_start_from_the_named_keyframes(lying: Path) -> None:
    made = environment("robot", "quadruped", f"env.xml={lying}", *reset_words("[home, lying]"))
    (term,) = made.lists.reset.values()
    drawn = [np.asarray(term(made.robot, jax.random.PRNGKey(seed))[0]) for seed in range(12)]
    home, lies = np.float32(made.robot.home), np.float32(made.mj_model.key_qpos[1])
    assert {bool(np.allclose(x, home)) for x in drawn} == {True, False}
    assert all(np.allclose(x, home) or np.allclose(x, lies) for x in drawn)
