"""The YAML files below configs/ compose, load, and have the keys and values of the typed configuration."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from rlstable.cli.compose import register_resolvers
from rlstable.config import guards as guard_config
from rlstable.config import recipes
from rlstable.config import run as typed
from rlstable.config.networks import NetworkConfig
from rlstable.config.ppo import PPOConfig
from rlstable.config.supervise import SuperviseConfig

CONFIGS = Path(__file__).parents[2] / "configs"
GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in CONFIGS.iterdir() if folder.is_dir()
}
ROBOTS = [name for name in GROUPS["env"] if name.startswith("robot")]
ENVS = [name for name in GROUPS["env"] if name not in ("gymnasium", "import", "playground", *ROBOTS)]
OPTIONS = [
    f"{group}={option}"
    for group, options in GROUPS.items()
    if group not in ("env", "sweep")
    for option in options
    if f"{group}={option}" != "ppo=playground"  # see tests/playground
]
IMPORT = ["env=import", "env.name=my_package.my_module:MyEnv"]
ANYWHERE = "recipe_for=accelerator"  # the published recipe on every machine
SECTIONS = {
    "ppo": PPOConfig,
    "network": NetworkConfig,
    "guards": guard_config.GuardsConfig,
    "precision": typed.PrecisionConfig,
    "eval": typed.EvalConfig,
    "logging": typed.LoggingConfig,
    "checkpoint": typed.CheckpointConfig,
    "render": typed.RenderConfig,
    "supervise": SuperviseConfig,
}
# Published recipes, so that no edit changes one unnoticed: google/brax notebooks/training.ipynb at 01ca8caf;
# for fast brax/training/agents/ppo/train_test.py of brax 0.14.2.
NUMBERS = (
    "num_envs", "batch_size", "num_minibatches", "num_updates_per_batch", "unroll_length", "discounting",
    "reward_scaling", "entropy_cost", "learning_rate",
)  # fmt: skip
PUBLISHED = {
    # those of NUMBERS, total_steps, action_repeat
    "ant": (4096, 2048, 32, 4, 5, 0.97, 10.0, 1e-2, 3e-4, 50_000_000, 1),
    "fast": (64, 64, 8, 4, 5, 0.95, 10.0, 1e-2, 3e-4, 2**15, 1),
    "halfcheetah": (2048, 512, 32, 8, 20, 0.95, 1.0, 1e-3, 3e-4, 50_000_000, 1),
    "humanoid": (2048, 1024, 32, 8, 10, 0.97, 0.1, 1e-3, 3e-4, 50_000_000, 1),
    "humanoidstandup": (2048, 1024, 32, 8, 15, 0.97, 0.1, 1e-2, 6e-4, 100_000_000, 1),
    "inverted_double_pendulum": (2048, 1024, 32, 4, 5, 0.97, 10.0, 1e-2, 3e-4, 20_000_000, 1),
    "inverted_pendulum": (2048, 1024, 32, 4, 5, 0.97, 10.0, 1e-2, 3e-4, 2_000_000, 1),
    "pusher": (2048, 512, 16, 8, 30, 0.95, 5.0, 1e-2, 3e-4, 50_000_000, 1),
    "reacher": (2048, 256, 32, 8, 50, 0.95, 5.0, 1e-3, 3e-4, 50_000_000, 4),
}


@pytest.fixture(scope="module", autouse=True)
def hydra_at_home():
    """Hydra reads configs/. The run folder does not depend on the time."""
    resolvers = dict(BaseContainer._resolvers)
    register_resolvers()
    OmegaConf.register_new_resolver("rlstable.run_dir", _run_dir, replace=True)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield
    BaseContainer._resolvers = resolvers


def _run_dir(resume: str | None, name: str) -> str:
    return resume or f"runs/{name}/now"


def read(file: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONFIGS / file))


def compose(*overrides: str) -> dict[str, Any]:
    composed = OmegaConf.to_container(hydra.compose("config", list(overrides)), resolve=True)
    composed.pop("hydra", None)
    return composed


def hydra_node(*overrides: str) -> Any:
    return hydra.compose("config", list(overrides), return_hydra_config=True).hydra


def load(*overrides: str) -> typed.Config:
    return typed.load(compose(*overrides))


@pytest.mark.parametrize("name", ENVS)
def test_environment_selects_its_recipe_for_the_machine(name: str) -> None:
    config = load(f"env={name}", ANYWHERE)
    assert config.env.name == name
    assert config.env.backend == (None if name == "fast" else "auto")
    assert hydra_node(f"env={name}", ANYWHERE).runtime.choices.ppo == name
    own = f"{name}_cpu" if f"{name}_cpu" in GROUPS["ppo"] else "cpu"
    choices = hydra_node(f"env={name}", "recipe_for=cpu").runtime.choices
    assert choices.ppo == (name if name in ("fast", "inverted_pendulum") else own)


@pytest.mark.parametrize("name", ROBOTS)
def test_task_of_a_robot_has_the_recipe_of_the_machine_and_every_key(name: str) -> None:
    config = load(f"env={name}", "env.xml=robot.xml", ANYWHERE)
    assert (config.env.source, config.env.name, config.env.backend) == ("robot", name, "auto")
    assert config.env.xml == str(Path("robot.xml").absolute())  # found again from another folder
    assert config.env.reset == "pool" and config.env.restore_info
    assert hydra_node(f"env={name}", "env.xml=robot.xml", "recipe_for=cpu").runtime.choices.ppo == (
        f"{name}_cpu" if name in ("robot_reach", "robot_getup") else "cpu"
    )


NO_ACCELERATOR = "(recipe_for=auto, and this machine has no accelerator); recipe_for=accelerator selects"
WITH_ACCELERATOR = "(recipe_for=auto, and this machine has an accelerator); recipe_for=cpu selects"
NOTICES = {
    "a user's class": (
        IMPORT,
        f"recipe: cpu {NO_ACCELERATOR} ppo=default",
        f"recipe: default {WITH_ACCELERATOR} ppo=cpu",
    ),
    "a task of a robot that extends another": (
        ["env=robot_swingup", "env.xml=robot.xml"],
        f"recipe: cpu {NO_ACCELERATOR} ppo=default",
        f"recipe: default {WITH_ACCELERATOR} ppo=cpu",
    ),
    "a device that the user chose": (
        ["env=humanoid", "recipe_for=cpu"],
        *["recipe: humanoid_cpu (recipe_for=cpu); recipe_for=accelerator selects ppo=humanoid"] * 2,
    ),
}


@pytest.mark.parametrize("case", NOTICES)
def test_notice_names_the_recipe_and_its_reason(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, on_cpu, on_accelerator = NOTICES[case]
    recipe_for = next((word.split("=")[1] for word in words if word.startswith("recipe_for=")), "auto")
    for platform, said in (("cpu", on_cpu), ("cuda,cpu", on_accelerator)):
        monkeypatch.setenv("JAX_PLATFORMS", platform)
        assert recipes.notice(words, recipe_for) == said
        assert f"recipe: {hydra_node(*words).runtime.choices.ppo}" in said


@pytest.mark.parametrize(
    ("files", "plugins", "found"), [((), ("a",), False), (("nvidia0",), (), False), (("nvidia0",), ("a",), True)]
)
def test_accelerator_needs_a_device_file_and_a_jax_plugin(
    monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], plugins: tuple[str, ...], found: bool
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(Path, "exists", lambda path: path.name in files)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert recipes.has_accelerator() == found


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_loads(option: str) -> None:
    load(*IMPORT, option)


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_equal_the_published_ones(name: str) -> None:
    config = load(f"env={name}", ANYWHERE, *(["ppo=inverted_pendulum_brax"] if name == "inverted_pendulum" else []))
    ppo = config.ppo
    numbers = [getattr(ppo, number) for number in NUMBERS]
    assert PUBLISHED[name] == (*numbers, config.total_steps, config.env.action_repeat)
    assert config.env.episode_length == (128 if name == "fast" else 1000)
    assert ppo.normalize_advantage == (name != "fast")
    assert config.network == NetworkConfig(value_obs_key="state")


@pytest.mark.parametrize("group", SECTIONS)
def test_documented_files_have_the_typed_keys_and_values(group: str) -> None:
    written = read(f"{group}/default.yaml")
    model = SECTIONS[group]
    assert flat_keys(written) == model_keys(model)
    assert model.model_validate({}).model_dump() == model.model_validate(written).model_dump()
    assert not [name for name, field in model.model_fields.items() if not field.is_required()], "a second default"


def test_config_yaml_has_the_typed_keys_and_values() -> None:
    written = read("config.yaml")
    groups = {next(iter(entry)) for entry in written["defaults"] if isinstance(entry, dict)} - {
        "override hydra/job_logging",
        "override hydra/hydra_logging",
    }
    assert groups == set(GROUPS)
    own = {key: value for key, value in written.items() if key not in ("defaults", "hydra", "env", "distributed")}
    assert set(own) | {"distributed"} | groups - {"sweep"} == set(typed.Config.model_fields)  # only Hydra reads it
    plain = typed.Config(env=typed.EnvConfig(name="ant"))
    assert read("recipe_for/auto.yaml") == {"recipe_for": plain.recipe_for}
    assert own == {key: getattr(plain, key) for key in own}
    assert typed.DistributedConfig(**written["distributed"]) == plain.distributed
    assert flat_keys(written["env"]) == model_keys(typed.EnvConfig)
    assert typed.EnvConfig(**{**written["env"], "name": "ant"}) == plain.env


def test_overrides_of_the_user_win_over_the_recipe() -> None:
    recipe = load("env=humanoid", ANYWHERE)
    assert load("ppo=default", "env=humanoid").ppo == PPOConfig()
    assert load("env=humanoid", "ppo=ant").ppo == load("env=ant", ANYWHERE).ppo
    changed = load("env=humanoid", ANYWHERE, "ppo.learning_rate=1e-3")
    assert changed.ppo == recipe.ppo.model_copy(update={"learning_rate": 1e-3})
    assert load("env=reacher", "env.action_repeat=1").env.action_repeat == 1


def test_recipe_sets_the_number_of_steps() -> None:
    assert load("env=humanoid", "ppo=default").total_steps == 30_000_000
    assert load(*IMPORT, "recipe_for=cpu").total_steps == 2_000_000
    assert load("env=humanoid", "total_steps=1000").total_steps == 1000


@pytest.mark.parametrize(
    ("words", "episodes"),
    [
        (["total_steps=200_000"], 16),
        (["total_steps=3_000_000"], 75),
        (["total_steps=3_000_000", "env.episode_length=500"], 128),
        (["total_steps=3_000_000", "eval.num_evals=20"], 37),
        (["total_steps=200_000", "eval.num_envs=128"], 128),
        (["eval.num_evals=0"], 128),
    ],
)
def test_evaluations_of_a_user_environment_play_at_most_a_quarter_of_the_training_steps(
    words: list[str], episodes: int
) -> None:
    assert load("env=import", "env.name=my:Env", *words).eval.num_envs == episodes


def test_guards_off_disables_every_guard_and_strict_is_stricter() -> None:
    off, default, strict = (load(f"guards={name}").guards for name in ("off", "default", "strict"))
    guards = [name for name in guard_config.GuardsConfig.model_fields if name != "limiters"]
    assert not any(getattr(off, name).enabled for name in guards)
    assert not any(off.limiters.model_dump().values())
    assert all(getattr(level, name).enabled for level in (default, strict) for name in guards)
    for name in guards:  # a guard that is switched on alone has the default numbers
        assert getattr(off, name).model_copy(update={"enabled": True}) == getattr(default, name)
    # A higher floor is stricter, and so is a thorough check.
    floors = {"policy_std_min", "min_std", "thorough"}
    changed = set()
    for name in guard_config.GuardsConfig.model_fields:
        for key, own in getattr(strict, name):
            usual = getattr(getattr(default, name), key)
            if own != usual:
                changed.add(name)
                assert (own < usual) != (key in floors), (name, key)
    assert {*guards, "limiters"} - changed == {"return_watch", "finite_samples"}
    assert strict.finite_state.patience == 1


def flat_keys(tree: dict[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for key, value in tree.items():
        keys |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return keys


def model_keys(model: type[typed.Section], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for key, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, typed.Section)
        keys |= model_keys(field.annotation, f"{prefix}{key}.") if nested else {prefix + key}
    return keys
