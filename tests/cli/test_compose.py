"""Composing inside a user's program that uses Hydra, OmegaConf, ml_collections or threads."""

from __future__ import annotations

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
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.config.overrides import overrides


def test_composing_leaves_the_hydra_of_the_users_program_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("where: ${recipe:7}\n")
    before = dict(BaseContainer._resolvers)
    try:
        OmegaConf.register_new_resolver("recipe", lambda number: f"recipe {number} of the user")
        with hydra.initialize_config_dir(str(tmp_path), version_base="1.1"):
            registered, instance, of_user = dict(BaseContainer._resolvers), GlobalHydra.instance(), GlobalHydra().hydra
            assert compose(["env=ant", "recipe_for=cpu"]).ppo == compose(["env=ant", "ppo=ant_cpu"]).ppo
            with pytest.raises(ConfigError):
                compose(["env=nothing"])
            assert BaseContainer._resolvers == registered
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
        ({"episode_length": 0}, "env.episode_length: "),
        ({"name": "toys:PointMass", "source": "import", "episode_length": 0}, "env.episode_length: "),
        (ConfigDict({"name": "nothing"}), "env: unknown option 'nothing'"),
        ({"nam": "fast"}, "env.nam: unknown key; did you mean name"),
    ],
)
def test_mapping_of_the_environment_selects_it_and_sets_its_keys(env: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        rlstable.fit(env)
    assert str(error.value).startswith(message)
