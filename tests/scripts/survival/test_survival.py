"""The survival matrix: cases, tasks and page."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.cli.compose import compose
from rlstable.config.faults import FaultConfig
from rlstable.device.trees import Env
from rlstable.envs.load import load_env
from scripts import pages
from scripts.survival import __main__ as survival
from scripts.survival import page as survival_page


def row(case: str, side: str, value: float | None, **more: Any) -> dict[str, Any]:
    own = {"task": "toy", "side": side, "case": case, "seed": 0, "finished": True, "trips": {}}
    return {**own, "return": value, **more}


def test_every_site_has_a_case() -> None:
    """Every case is a fault that the configuration has."""
    sites = {FaultConfig(**case.fault).site for case in survival.CASES.values() if case.fault}
    assert sites == set(FaultConfig.sites())


@pytest.mark.parametrize("task", survival.TASKS)
def test_every_task_has_100_iterations(task: str) -> None:
    """A fault starts in the same iteration of every task, and a solved task has time to collapse and to recover."""
    config = compose(survival.settings_of(task, survival.CASES["disk full"]))
    assert config.total_steps == 100 * config.env_steps_per_iteration and config.eval.num_envs == 32


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


def test_survival_page_shows_every_case_and_side(tmp_path: Path) -> None:
    """The picture is beside the page."""
    returns = {"off": 10.0, "default": 1000.0}
    rows = [row(case, side, value) for case in ("clean", "bad") for side, value in returns.items()]
    rows[-1]["trips"] = {"quarantine": 3}
    survival_page.write(rows, ["clean", "bad", "never run"], tmp_path / "survival.jsonl", lambda *_: True)
    page = (tmp_path / "survival.md").read_text()
    assert "| bad | 1.00 / 1.00 | 1.00 / 1.00 | quarantine 3 |" in page
    assert "never run" not in page
    assert (tmp_path / "survival.png").read_bytes().startswith(b"\x89PNG")


def test_rows_with_the_same_cells_share_a_row() -> None:
    assert pages.merged([("a", "1"), ("b", "2"), ("c", "1")]) == [["a; c", "1"], ["b", "2"]]
