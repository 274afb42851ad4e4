"""A policy from its run folder alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import tiny_config

import rlstable
from rlstable.config import ConfigError
from rlstable.policy import choose_action
from rlstable.runner import Runner

pytestmark = pytest.mark.usefixtures("quick_compile")


def trained(folder: Path, **sections: Any) -> Runner:
    runner = Runner(
        tiny_config(
            guards={"limiters": {"observation": 5.0, "policy_std_max": 2.0}},
            devices=1,
            total_steps=128,
            eval={"num_evals": 1, "num_envs": 2},
            sinks={"console": "off"},
            **sections,
        ),
        folder,
    )
    runner.run()
    return runner


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return trained(tmp_path_factory.mktemp("run"))


def test_it_is_the_policy_that_was_trained(runner: Runner) -> None:
    observations = jax.random.normal(jax.random.PRNGKey(3), (100, 4)) * 10
    expected = choose_action(
        runner.ppo.networks, "default", runner.state.params, runner.state.normalizer, observations, None, True
    )
    policy = rlstable.load_policy(runner.run_dir)
    np.testing.assert_allclose(policy.act(observations), expected, atol=1e-6)
    assert policy.act(np.zeros(4)).shape == (2,)
    assert policy.host["step"] == 128


def test_a_sampled_action_needs_a_key_and_follows_it(runner: Runner) -> None:
    policy = rlstable.load_policy(runner.run_dir, "latest")
    with pytest.raises(ValueError, match="needs a random key"):
        policy.act(jnp.zeros(4), deterministic=False)
    first, again, other = (
        policy.act(jnp.zeros(4), jax.random.PRNGKey(seed), deterministic=False) for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_fresh_process_needs_neither_the_environment_nor_brax(runner: Runner, tmp_path: Path) -> None:
    code = f"""
import sys, numpy as np, rlstable
action = rlstable.load_policy({str(runner.run_dir)!r}).act(np.zeros(4))
assert action.shape == (2,), action
assert not [name for name in sys.modules if name.split('.')[0] in ('brax', 'mujoco', 'toys')]
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=_environment())


def _environment() -> dict[str, str]:
    import os

    root = Path(__file__).resolve().parent.parent
    return {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}


def test_dictionary_observations(tmp_path: Path) -> None:
    runner = trained(
        tmp_path,
        env={"name": "toys:NamedPointMass"},
        network={"policy_obs_key": "state", "value_obs_key": "privileged_state"},
    )
    policy = rlstable.load_policy(tmp_path)
    observation = {"state": np.ones(4), "privileged_state": np.ones(5)}
    assert policy.act(observation).shape == (2,)
    # The value network's key is not needed to act, nor does the policy look at it.
    assert runner.state.params["value"]["params"]["hidden_0"]["kernel"].shape == (5, 8)
    assert runner.state.params["policy"]["params"]["mlp"]["hidden_0"]["kernel"].shape == (4, 8)


def test_there_is_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere/checkpoints: no such folder"):
        rlstable.load_policy(tmp_path / "nowhere")
