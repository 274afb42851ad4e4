"""Playground's own settings of PPO are defaults under the user's overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

playground_package = pytest.importorskip("mujoco_playground")

from commands import typed
from mujoco_playground.config import dm_control_suite_params, locomotion_params, manipulation_params

from rlstable.cli import playground
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.config.networks import NetworkConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.run import EnvConfig, EvalConfig
from rlstable.io.run_folder import write_config
from rlstable.train import main

ROOT = Path(__file__).resolve().parents[2]
CARTPOLE = ["env=playground", "env.name=CartpoleBalance", "recipe_for=accelerator"]
GO1 = ["env=playground", "env.name=Go1JoystickFlatTerrain", "recipe_for=accelerator"]
SUITES = {
    playground_package.dm_control_suite: dm_control_suite_params,
    playground_package.locomotion: locomotion_params,
    playground_package.manipulation: manipulation_params,
}
TASKS = [(name, published) for suite, published in SUITES.items() for name in suite.ALL_ENVS]


def test_task_trains_with_playgrounds_settings() -> None:
    config = compose(CARTPOLE)
    ppo = config.ppo
    sizes = (ppo.num_envs, ppo.batch_size, ppo.num_minibatches, ppo.num_updates_per_batch, ppo.unroll_length)
    assert sizes == (2048, 1024, 32, 16, 30)
    assert (ppo.discounting, ppo.learning_rate, ppo.entropy_cost, ppo.reward_scaling) == (0.995, 1e-3, 1e-2, 10.0)
    assert (ppo.num_resets_per_eval, ppo.max_grad_norm, ppo.clipping_epsilon) == (10, None, 0.3)
    assert (config.env.source, config.env.episode_length, config.env.action_repeat) == ("playground", 1000, 1)
    assert (config.eval.num_evals, config.eval.at_start, config.eval.num_envs) == (9, True, 128)
    assert config.network == compose([]).network.model_copy(
        update={"policy_hidden_layer_sizes": (32,) * 4, "value_hidden_layer_sizes": (256,) * 5}
    )


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ([], 88_473_600),  # 60M in 9 parts of 10 chunks of whole iterations of 983,040 steps
        (["ppo.num_resets_per_eval=0"], 61_931_520),
        (["eval.num_evals=1"], 68_812_800),
        (["env.action_repeat=2"], 176_947_200),
        (["total_steps=1000"], 1000),
    ],
)
def test_total_steps_are_those_that_brax_trains(overrides: list[str], steps: int) -> None:
    assert compose([*CARTPOLE, *overrides]).total_steps == steps


def test_typed_settings_win_over_playgrounds() -> None:
    config = compose([*GO1, "ppo.learning_rate=0.5", "network=small", "env.episode_length=100", "eval.at_start=false"])
    assert (config.ppo.learning_rate, config.ppo.num_envs) == (0.5, 8192)
    assert config.network.value_hidden_layer_sizes == (64, 64)
    assert (config.env.episode_length, config.eval.at_start, config.eval.num_evals) == (100, False, 9)
    assert compose([*GO1, "ppo=default"]).ppo == compose(["ppo=default"]).ppo


@pytest.mark.parametrize(("name", "published"), TASKS, ids=[name for name, _ in TASKS])
def test_every_setting_of_every_task_is_known(name: str, published: Any) -> None:
    settings = playground._settings(name, None)
    asked = published.brax_ppo_config(name)
    assert settings["ppo.learning_rate"] == asked.learning_rate and settings["ppo.unroll_length"] == asked.unroll_length
    fields = {"ppo": PPOConfig, "network": NetworkConfig, "env": EnvConfig, "eval": EvalConfig}
    for key in settings:
        section, _, field = key.rpartition(".")
        assert field in fields[section].model_fields if section else key == "total_steps"
    texts = [(ROOT / "configs" / group / "playground.yaml").read_text() for group in ("ppo", "env")]
    written = set(re.findall(r"\$\{rlstable\.playground:([\w.]+)\}", "".join(texts)))
    assert settings.keys() <= written, "the files of configs/ ask for every setting that Playground has"


MISTAKES = {
    "no name": (["env=playground"], "env.name: is missing; name a task of MuJoCo Playground, e.g. env.name="),
    "another environment's recipe": (
        ["env=fast", "env.source=playground", "env.name=CartpoleBalance"],
        "env.source: playground alone keeps the recipe of another environment; write env=playground "
        "env.name=CartpoleBalance, and ppo=<recipe> to choose another recipe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_leaves_no_folder(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    assert typed(main, *words) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith(f"rlstable: {said}") and printed.out == ""
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_few_cores_have_their_own_recipe_with_the_episodes_and_observations_of_the_task() -> None:
    config, published = compose([*GO1[:2], "recipe_for=cpu"]), compose(GO1)
    assert config.ppo == compose(["ppo=playground_cpu"]).ppo.model_copy(update={"entropy_cost": 0.0})
    assert (config.total_steps, config.network.policy_hidden_layer_sizes) == (4_000_000, (64, 64))
    assert config.env == published.env.model_copy(update={"reset": "pool", "stagger": True})
    assert (config.network.policy_obs_key, config.network.value_obs_key) == ("state", "privileged_state")
    assert (config.eval.num_evals, config.eval.at_start, config.eval.num_envs) == (10, False, 100)


def test_tasks_with_many_actuators_train_with_less_noise() -> None:
    """With the noise of the other tasks, Go1 returned 0 after 2 million steps, and HumanoidStand diverged."""

    def noise(*words: str) -> tuple[float, float]:
        config = compose([*words, "recipe_for=cpu"])
        return config.network.init_noise_std, config.ppo.entropy_cost

    assert noise(*GO1[:2]) == noise("env=playground", "env.name=HumanoidRun") == (0.5, 0.0)
    assert noise(*CARTPOLE[:2]) == noise("env=ant", "ppo=playground_cpu") == (1.0, 0.01)


def test_some_tasks_train_with_shorter_episodes_than_evaluations() -> None:
    def lengths(*words: str) -> tuple[int, int | None, int, int]:
        config = compose([*words, "recipe_for=cpu"])
        env, millions = config.env, config.total_steps // 1_000_000
        return env.episode_length, env.training_episode_length, env.reset_pool_refresh, millions

    assert lengths("env=playground", "env.name=FingerTurnHard") == (1000, 100, 1, 8)
    assert lengths("env=playground", "env.name=HumanoidWalk") == (1000, 100, 1, 4)
    assert lengths("env=playground", "env.name=CheetahRun") == (1000, None, 10, 4)
    assert lengths("env=pusher") == (1000, 100, 4, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run of another version of Playground, which had other numbers."""
    config = compose([*CARTPOLE, "ppo.learning_rate=0.5", "ppo.unroll_length=7", "total_steps=999"])
    write_config(tmp_path, config.model_dump(mode="json"))
    return tmp_path


def numbers(config: Any) -> tuple[Any, ...]:
    return config.ppo.learning_rate, config.ppo.unroll_length, config.ppo.num_envs, config.total_steps


def test_resumed_run_keeps_its_numbers_but_for_typed_keys(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resume = f"resume={saved}"
    assert numbers(compose([*CARTPOLE, resume, "ppo.num_envs=64"])) == (0.5, 7, 64, 999)
    assert numbers(compose(["env=playground", resume])) == (0.5, 7, 2048, 999)
    with pytest.raises(ConfigError, match="was trained on CartpoleBalance, not on PendulumSwingup"):
        compose(["env=playground", "env.name=PendulumSwingup", resume])
    monkeypatch.setattr(playground, "_settings", None)  # Playground is not asked
    assert numbers(compose([resume, "total_steps=1000"])) == (0.5, 7, 2048, 1000)
