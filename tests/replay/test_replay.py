"""Replay of a bad step: bit for bit, with the right conclusion about its cause."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import exit_code
from short_runs import trained
from toys import PointMass

from rlstable.config import ConfigError
from rlstable.replay.__main__ import main
from rlstable.replay.engines import step_again
from rlstable.replay.report import as_data, compare, conclude, rows
from rlstable.supervise.incident import BadNumber, Incident, read

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def caught(run_dir: Path, **sections: Any) -> Incident:
    """The first incident of a run of one iteration."""
    defaults: dict[str, Any] = {"total_steps": 1, "checkpoint": {"enabled": False}}
    trained(run_dir, **defaults | {"supervise": {"recovery": {"enabled": False}}} | sections)
    return read(run_dir / "incidents" / "1-1")


PHYSICS = {"kwargs": {"fault": "physics", "probability": 0.1}}


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    return caught(tmp_path_factory.mktemp("run"), env=PHYSICS)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"env": PHYSICS | {"name": "toys:NamedPointMass", "action_repeat": 3}},
        pytest.param({"env": {"name": "test_replay:Keyed"}}, marks=pytest.mark.slow),
    ],
    ids=["plain", "named observations, action repeat", "typed keys"],
)
def test_replayed_step_equals_that_of_the_run(sections: dict[str, Any], incident: Incident, tmp_path: Path) -> None:
    found = caught(tmp_path, **sections) if sections else incident
    report = compare(found, step_again(found))
    assert report.same == "float32: bit for bit what the run had"
    after = found.part("after")
    for name, array in report.columns["float32"].items():
        assert name == "action" or array.tobytes() == after[name].tobytes(), name
    assert str(report.bad["float32"]) == str(report.bad["in the run"]) != "[]"  # NaN does not equal itself
    assert list(report.columns) == ["before", "in the run", "float32", "float64"]  # toys have no MuJoCo model


def test_replay_warns_about_random_draws_in_float64(incident: Incident) -> None:
    report = compare(incident, step_again(incident))
    assert "draws random numbers" in report.notes["float64"]
    assert report.first.startswith("pipeline_state/q[0] = nan (not finite) in float32")


def test_replay_finds_a_number_that_is_bad_in_float32_only(tmp_path: Path) -> None:
    found = caught(tmp_path, env={"name": "test_replay:Overflowing"})
    report = compare(found, step_again(found))
    assert report.first == "reward = inf (not finite) in float32, not in float64"
    assert report.conclusion.startswith("bad in float32 only")
    assert report.columns["float64"]["reward"] == pytest.approx(138.155)
    assert report.columns["float64"]["pipeline_state/q"].dtype == np.float64
    table = dict(rows(report))
    assert table["reward"] == [table["reward"][0], "inf", "inf", "138"]


def test_replay_names_an_injected_fault(tmp_path: Path) -> None:
    found = caught(tmp_path, fault={"site": "observation", "probability": 0.2})
    assert "info/injection_key" in found.part("before")
    report = compare(found, step_again(found))
    assert [one.array for one in report.bad["in the run"]] == ["obs"]
    assert not report.bad["float32"] and not report.bad["float64"]
    assert report.first == "no engine has a bad value"
    assert report.conclusion.startswith("not reproduced: the run injected fault.site=observation; without the fault")


def test_replay_with_another_environment_is_an_error(incident: Incident) -> None:
    config = incident.config.model_copy(
        update={"env": incident.config.env.model_copy(update={"kwargs": {"named": True}})}
    )
    with pytest.raises(
        ConfigError, match=r"the incident does not fit this toys:PointMass: obs/.* here, missing there; replay it with"
    ):
        step_again(incident._replace(config=config))
    more = incident.arrays | {"before/info/wind": np.zeros(3, np.float32)}
    with pytest.raises(ConfigError, match="which has no info/wind"):
        step_again(incident._replace(arrays=more))


Q, REWARD, ACTION = (
    BadNumber(name, (), float("nan"), "not finite") for name in ("pipeline_state/q", "reward", "action")
)
THREE, TWO = ["float32", "float64", "C MuJoCo"], ["float32", "float64"]


@pytest.mark.parametrize(
    ("engines", "bad", "said"),
    [
        (THREE, {}, "not reproduced: the bad number did not come from the step"),
        (THREE, {"float32": [Q]}, "bad in float32 only: try precision=highest"),
        (THREE, {"float32": [Q], "float64": [Q], "C MuJoCo": [Q]}, "bad in all three: the model itself"),
        (THREE, {"float32": [Q], "float64": [Q]}, "bad in MJX at both precisions but not in C MuJoCo"),
        (TWO, {"float32": [Q], "float64": [Q]}, "bad in float32 and float64: the model or the environment's code"),
        (THREE, {"float32": [REWARD], "float64": [REWARD]}, "the physics is fine and reward is bad"),
        (THREE, {"float64": [Q], "C MuJoCo": [Q]}, "bad in float64 and C MuJoCo only, not in float32"),
        (THREE, {"in the run": [ACTION], "float32": [ACTION, Q]}, "the action was bad before the step"),
    ],
)
def test_replay_conclusion_depends_on_the_engines_with_bad_numbers(
    incident: Incident, engines: list[str], bad: dict[str, list[BadNumber]], said: str
) -> None:
    found = {name: bad.get(name, []) for name in ("before", "in the run", *THREE)}
    assert conclude(incident, found, engines).startswith(said)


# --- the command


run = functools.partial(exit_code, main)


def test_replay_command_prints_a_table_and_json(incident: Incident, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(str(incident.folder)) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    facts = incident.facts
    where = f"iteration 1, unroll {facts['unroll']}, step {facts['step']}, environment {facts['environment']}"
    assert lines[1] == f"toys:PointMass: {where}"
    assert any(line.split() == ["reward", *line.split()[1:2], "nan", "nan", *line.split()[4:]] for line in lines)
    assert max(map(len, lines)) <= 120
    assert run(str(incident.folder), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data == as_data(compare(incident, step_again(incident)))
    assert data["conclusion"] == lines[-1]


class Overflowing(PointMass):
    """An environment whose reward is 138 in float64 and infinite in float32, because 1e60 does not fit."""

    def step(self, state: Any, action: jax.Array) -> Any:
        state = super().step(state, action)
        return state.replace(reward=jnp.log(jnp.square(1e30 * (1.0 + 0.0 * state.reward))))


class Keyed(PointMass):
    """Which carries a typed random key, and whose observation is too large."""

    def reset(self, rng: jax.Array) -> Any:
        state = super().reset(rng)
        return state.replace(info={**state.info, "typed": jax.random.key(3)})

    def step(self, state: Any, action: jax.Array) -> Any:
        key, draw = jax.random.split(state.info["typed"])
        state = super().step(state, action)
        noise = 1e12 * (1.0 + jax.random.uniform(draw))
        return state.replace(obs=state.obs.at[3].add(noise), info={**state.info, "typed": key})
