"""Tasks of MuJoCo Playground are loaded by name, and mistakes are one line before anything compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

pytest.importorskip("mujoco_playground")

from mujoco_playground._src import locomotion, mjx_env

from rlstable.config import ConfigError
from rlstable.config.run import EnvConfig
from rlstable.config.schema import validate
from rlstable.device import mjx
from rlstable.envs import menagerie, playground
from rlstable.envs.load import load
from rlstable.envs.randomized import RandomizedEnv

GO1 = "Go1JoystickFlatTerrain"


def task(name: str = "CartpoleBalance", **settings: Any) -> EnvConfig:
    return validate(EnvConfig, {"source": "playground", "name": name, **settings})


def test_task_is_loaded_with_its_overrides_and_its_own_episode_length() -> None:
    loaded = load(task(episode_length=20, kwargs={"ctrl_dt": 0.02, "vision_config": {"nworld": 8}}), {"sim_dt": 0.02})
    env = loaded.env
    assert loaded.backend == "mjx" and env.action_size == 1
    assert (env.mjx_model.impl.value, env.dt, env.sim_dt, env._config.vision_config.nworld) == ("jax", 0.02, 0.02, 8)
    assert env._config.episode_length == 1000, "training counts env.episode_length itself"


@pytest.mark.parametrize(("backend", "impl"), [("cpu", "jax"), ("gpu", "warp"), ("tpu", "jax")])
def test_auto_is_warp_on_cuda_and_jax_elsewhere(monkeypatch: pytest.MonkeyPatch, backend: str, impl: str) -> None:
    class Device:
        class client:
            platform_version = "cuda 12"

    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert mjx.implementation("auto") == impl
    assert mjx.implementation("jax") == "jax"
    Device.client.platform_version = "rocm 6"
    assert mjx.implementation("auto") == "jax"


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt name": ({"name": "CartpoleBallance"}, "env.name: MuJoCo Playground has no task 'CartpoleBallance'; "
                        "did you mean CartpoleBalance?"),
    "another name": ({"name": "xyz"}, "env.name: MuJoCo Playground has no task 'xyz'; choose one of AcrobotSwingup, "),
    "a misspelt setting": ({"kwargs": {"vision_config": {"nworlds": 8}}}, "env.kwargs: CartpoleBalance has no setting "
                           "'vision_config.nworlds'; did you mean vision_config.nworld?"),
    "a setting of another type": ({"kwargs": {"ctrl_dt": "fast"}}, "env.kwargs: Playground cannot build "
                                  "CartpoleBalance with ctrl_dt='fast', impl='jax': TypeError: "),
    "pixels": ({"kwargs": {"vision": True}}, "env.kwargs: rlstable does not train on pixels; leave vision=false"),
    "a backend of Brax": ({"backend": "spring"}, "env.backend: spring is for Brax's environments; choose auto, native "
                          "or mjx for env=playground"),
    "no choice of implementation": ({"name": "AeroCubeRotateZAxis", "impl": "jax"}, "env.impl: AeroCubeRotateZAxis "
                                    "does not let you choose the implementation of MJX; set env.impl=auto"),
    "no robot's randomisation": ({"name": "SpotGetup", "randomize": True}, "env.randomize: Playground has no "
                                 "randomisation for SpotGetup; set env.randomize=false, or give a function of your "
                                 "own: env.randomization_fn=package.module:function"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_prints_nothing(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings, said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as refused:
        load(task(**settings))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
    assert capsys.readouterr() == ("", "")


def test_missing_robot_models_are_one_line_and_nothing_is_cloned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path / "no clone")
    monkeypatch.setattr(mjx_env, "_clone_with_progress", lambda *_: pytest.fail("cloned"))
    monkeypatch.setattr(menagerie, "_PACKAGES", ("no_such_package",))
    menagerie._folders.cache_clear()
    with pytest.raises(ConfigError, match=r"^env\.name: unitree_go1 is a model of MuJoCo Menagerie; .*\[menagerie\]"):
        load(task(GO1))
    menagerie._folders.cache_clear()


def test_incomplete_clone_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mjx_env, "MENAGERIE_PATH", tmp_path)
    with pytest.raises(ConfigError, match=rf"^env\.kwargs: Playground cannot build {GO1} .* delete the clone, "):
        load(task(GO1))


def test_task_has_its_own_randomisation() -> None:
    env = load(task(GO1, randomize=True)).env
    assert isinstance(env, RandomizedEnv)
    assert playground.randomizer(GO1) is locomotion.get_domain_randomizer(GO1)
    shapes = jax.eval_shape(env.reset, jax.random.PRNGKey(0)).info["model"]
    assert set(shapes) == {
        ".geom_friction", ".body_ipos", ".body_mass", ".qpos0", ".dof_frictionloss", ".dof_armature",
    }  # fmt: skip
    assert not isinstance(load(task(GO1, randomize=True), randomize=False).env, RandomizedEnv)
