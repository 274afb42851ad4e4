"""Words as Hydra reads them, and composing inside a user's program that uses Hydra, ml_collections or threads."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import hydra
import jax.numpy as jnp
import numpy as np
import pytest
from hydra import version
from hydra.core.global_hydra import GlobalHydra
from ml_collections import ConfigDict
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

import rlstable
from rlstable.cli.compose import compose, prepared
from rlstable.config import ConfigError, load
from rlstable.config.defaults import config_dir
from rlstable.config.overrides import literal, overrides
from rlstable.io.run_folder import read_settings, write_config


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["env=ant", "--cfg", "job"],
        ["--multirun", "--run", "--resolve", "--package", "ppo", "--help", "--hydra-help", "--version"],
        ["--config-name", "mine", "--config-dir", "here", "--config-path", "there"],
        ["resume=auto", "hydra.run.dir=new", "resume=null", "resume=nowhere"],
        ["+env.kwargs={a: 1}", "~env.kwargs"],
    ],
)
def test_words_of_hydra_do_not_change(words: list[str]) -> None:
    assert prepared(words) == words


def test_every_command_of_the_help_composes() -> None:
    lines = re.findall(r"^ +python -m rlstable.train(.*?)(?:  .*)?$", (config_dir() / "config.yaml").read_text(), re.M)
    assert len(lines) >= 10
    for line in lines:
        words = [word for word in prepared(line.split()) if not word.startswith("resume=")]
        cut = words.index("--cfg") if "--cfg" in words else len(words)
        compose([word.replace("0,1,2", "1") for word in words[:cut] if not word.startswith("--")])


@pytest.mark.parametrize("key", ["hydra.run.dir", "resume", "env.xml", "ppo.num_envs", "+env.task.foot"])
@pytest.mark.parametrize("nothing", ["", " "])
def test_key_without_a_value_such_as_an_unset_variable_is_refused(key: str, nothing: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: has no value; write .*=<value>, or leave it out$"):
        prepared([f"{key}={nothing}"])


@pytest.mark.parametrize("key", ["resume", "hydra.run.dir", "hydra.sweep.dir", "compile_cache"])
@pytest.mark.parametrize("typed", ["~/my runs/1", '"~/my runs/1"'])
def test_tilde_after_a_key_of_a_folder_is_the_home_folder(
    key: str, typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepared([f"{key}={typed}"]) == [f"{key}={literal(tmp_path / 'my runs' / '1')}"]


def test_existing_folder_is_quoted_for_hydra_as_typed(here: Path) -> None:
    for name in ("läuf [1], a=b", "it's", "plain"):
        Path(name).mkdir()
    words = prepared(["resume=läuf [1], a=b", "hydra.run.dir=it's", "resume=plain", "env.name=plain"])
    assert words == ['resume="läuf [1], a=b"', 'hydra.run.dir="it\'s"', "resume=plain", "env.name=plain"]


def test_resume_latest_is_the_newest_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time in (("old", 1), ("new [1]", 3), ("middle", 2)):
        (here / "runs" / "ant" / name).mkdir(parents=True)
        (here / "runs" / "ant" / name / "config.yaml").touch()
        os.utime(here / "runs" / "ant" / name / "config.yaml", (time, time))
    assert prepared(["resume=latest"]) == ['resume="runs/ant/new [1]"']
    assert capsys.readouterr().err == "run: runs/ant/new [1], the newest run\n"


def test_composing_leaves_the_hydra_of_the_users_program_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("where: ${recipe:7}\n")
    before = dict(BaseContainer._resolvers)
    try:
        OmegaConf.register_new_resolver("recipe", lambda number: f"recipe {number} of the user")
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.1"):
            instance, of_user = GlobalHydra.instance(), GlobalHydra().hydra
            assert compose(["env=ant", "recipe_for=cpu"]).ppo == compose(["env=ant", "ppo=ant_cpu"]).ppo
            assert GlobalHydra.instance() is instance and instance.hydra is of_user
            assert str(version.getbase()) == "1.1"
            assert hydra.compose("mine").where == "recipe 7 of the user"
    finally:
        BaseContainer._resolvers = before


def test_threads_compose_at_the_same_time() -> None:
    found: dict[int, Any] = {}

    def work(seed: int) -> None:
        found[seed] = compose([f"seed={seed}", "env=fast"]).seed

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {seed: seed for seed in range(8)}


@pytest.mark.parametrize("kind", [dict, ConfigDict, OmegaConf.create])
def test_mappings_of_all_libraries_are_groups(kind: Any) -> None:
    group = kind({"num_envs": 8, "batch_size": 8})
    config = compose(["env=fast", *overrides("ppo", group), *overrides("network.policy_hidden_layer_sizes", [4])])
    assert (config.ppo.num_envs, config.ppo.batch_size) == (8, 8)
    nested = compose(overrides("guards", kind({"limiters": {"kl": None}})))
    assert nested.guards.limiters.kl is None and nested.guards.limiters.observation is not None
    kwargs = compose(["env=fast", *overrides("env", kind({"kwargs": {"sizes": [1, 2]}}))]).env.kwargs
    assert kwargs == {"sizes": [1, 2]}


def test_numbers_of_jax_and_numpy_are_numbers() -> None:
    words = [*overrides("total_steps", jnp.int32(640)), *overrides("ppo", {"learning_rate": jnp.float32(0.5)})]
    config = compose([*words, *overrides("seed", np.uint32(3)), *overrides("deterministic", jnp.asarray(True))])
    assert (config.total_steps, config.ppo.learning_rate, config.seed, config.deterministic) == (640, 0.5, 3, True)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"name": "fast", "episode_length": 0}, "env.episode_length: "),
        ({"name": "toys:PointMass", "source": "import", "episode_length": 0}, "env.episode_length: "),
        (ConfigDict({"name": "nothing"}), "env: unknown option 'nothing'"),
    ],
)
def test_mapping_of_the_environment_selects_it_and_sets_its_keys(env: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        rlstable.fit(env)
    assert str(error.value).startswith(message)


def test_resolver_in_saved_settings_is_text_and_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another user's run folder could read environment variables."""
    monkeypatch.setenv("RLSTABLE_TEST_SECRET", "secret")
    saved = compose(["env=fast", "ppo.num_envs=${ppo.batch_size}", "ppo.batch_size=32"]).model_dump(mode="json")
    saved["env"]["kwargs"] = {"token": "${oc.env:RLSTABLE_TEST_SECRET}"}
    write_config(tmp_path, saved)
    resumed = compose([f"resume={tmp_path}", "ppo={num_envs: 32, batch_size: 64}"])
    for config in (load(read_settings(tmp_path)), resumed):
        assert config.ppo.num_envs == 32 and config.env.kwargs == {"token": "${oc.env:RLSTABLE_TEST_SECRET}"}


def test_value_outside_of_hydras_grammar_is_what_was_typed() -> None:
    for path in ("/data/机器人/手.xml", "/data/a (1)/b.xml", "/data/it's.xml", "/data/a b/c&d;e.xml"):
        config = compose(
            ["env=ant", f"env.kwargs={{file: {path}, size: 2, flags: [true, x]}}", f"compile_cache={path}"]
        )
        assert config.env.kwargs == {"file": path, "size": 2, "flags": [True, "x"]}
        assert str(config.compile_cache) == path
    config = compose(["env=ant", 'eval.env_kwargs={file: "/x[1].xml"}'])
    assert config.eval.env_kwargs == {"file": "/x[1].xml"}
    with pytest.raises(ConfigError, match=r"close each bracket and quote"):
        compose(["env=ant", "env.kwargs={file: /x[1].xml}"])


@pytest.mark.parametrize(
    ("words", "own", "mode"),
    [
        (["logging=wandb"], None, "online"),
        (["logging=wandb"], "offline", "offline"),
        (["logging=wandb"], "disabled", "disabled"),
        (["logging=wandb_offline"], "online", "offline"),
        (["logging=wandb_offline"], "disabled", "disabled"),
        (["logging=wandb", "logging.wandb.mode=online"], "disabled", "online"),
    ],
)
def test_variables_of_wandb_replace_the_groups_defaults_but_not_what_is_typed(
    words: list[str], own: str | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if own is not None:
        monkeypatch.setenv("WANDB_MODE", own)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_ENTITY", "team")
    found = compose(words).logging.wandb
    assert (found.mode, found.project, found.entity, found.group) == (mode, "mine", "team", None)
