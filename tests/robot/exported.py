"""Exported policies of robots, without a training: random networks of one small layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from moments import MODELS, config
from toys import make_networks

from rlstable.envs.load import load_env
from rlstable.export.formats import write_onnx, write_player
from rlstable.export.function import policy_function
from rlstable.policy.policy import Policy
from rlstable.policy.saved_run import SavedRun
from rlstable.ppo import normalizer

TINY = ("env.backend=native", "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]")


class Exported(NamedTuple):
    """The environment of a policy, the policy, and the folder of its files."""

    env: Any
    policy: Policy
    folder: Path

    @property
    def onnx(self) -> Path:
        return self.folder / "policy.onnx"


def random_run(env: Any, settings: Any, folder: Path, gain: float = 8.0) -> SavedRun:
    """A run whose policy is random; `gain` makes its actions larger."""
    networks = make_networks(settings, env.action_size)
    obs = jax.tree.map(lambda x: jnp.zeros(x.shape), jax.eval_shape(env.reset, jax.random.PRNGKey(0)).obs)
    params, statistics = networks.init(jax.random.PRNGKey(1), obs), normalizer.init(obs)
    policy = jax.tree.map(lambda x: gain * x, params["policy"])
    host = {"host": {"iteration": 0}, "step": 0}
    return SavedRun(folder, settings, Policy(networks, {"policy": policy}, statistics, "default", host))


def exported(folder: Path, task: str, model: str, *words: str, gain: float = 8.0) -> Exported:
    settings = config(task, model, *TINY, *words)
    env = load_env(settings.env)
    run = random_run(env, settings, folder, gain)
    function = policy_function(run)
    write_onnx(function, folder / "policy.onnx")
    assert function.robot is not None
    write_player(function.robot, folder)
    return Exported(env, run.policy, folder)


def file_of(model: str) -> Path:
    return MODELS / f"{model}.xml"
