"""The survival matrix: cases, tasks and page."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.cli.compose import compose
from rlstable.config.faults import FaultConfig
from rlstable.device.trees import Env
from rlstable.envs.load import load_env
from scripts.survival import __main__ as survival


def test_every_site_has_a_case() -> None:
    """Every case is a fault that the configuration has."""
    sites = {FaultConfig(**case.fault).site for case in survival.CASES.values() if case.fault}
    assert sites == set(FaultConfig.sites())


@pytest.mark.parametrize(("case", "begins"), [("disk full", 0), ("counters at 2^31", 2**31)])
@pytest.mark.parametrize("task", survival.TASKS)
def test_every_task_has_100_iterations(task: str, case: str, begins: int) -> None:
    """A fault starts in the same iteration of every task, and a solved task has time to collapse and to recover."""
    config = compose(survival.settings_of(task, survival.CASES[case]))
    assert config.total_steps == begins + 100 * config.env_steps_per_iteration and config.eval.num_envs == 32


@pytest.mark.parametrize("case", [case for case in survival.CASES.values() if case.unstable or case.late])
def test_changed_environment_of_a_training_is_sound_in_evaluations(case: survival.Case) -> None:
    config = compose(survival.settings_of("generalized", case))

    def observed(env: Env) -> np.ndarray:
        starts = jax.random.split(jax.random.PRNGKey(0), 64)
        return np.array(jax.jit(jax.vmap(lambda key: env.step(env.reset(key), jnp.ones(1)).obs))(starts))

    trained, sound = (observed(load_env(config.env, own)) for own in ({}, config.eval.env_kwargs))
    assert np.isfinite(sound).all() and np.abs(sound).max() < 20 and not np.array_equal(trained, sound)


@pytest.mark.slow
def test_seeds_of_a_case_train_by_the_plain_command_and_their_rows_have_trips() -> None:
    case = survival.CASES["reward nan"]
    short = dataclasses.replace(case, overrides=("total_steps=35840",), fault={**case.fault, "probability": 0.1})
    rows = list(survival.train("point_mass", "default", short, range(2)))
    assert [(row["seed"], row["finished"]) for row in rows] == [(0, True), (1, True)]
    assert all(row["return"] > 0 and row["trips"]["quarantine"] > 0 for row in rows)
