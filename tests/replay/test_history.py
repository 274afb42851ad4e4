"""Histories of incidents: the steps before a bad step, recomputed bit for bit without changing the files of the run."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import Physics, PointMass, State, tiny_config

from rlstable.config import ConfigError
from rlstable.replay import history as histories
from rlstable.replay import rerun, trend
from rlstable.replay.__main__ import main
from rlstable.replay.history import History, make, read
from rlstable.replay.rerun import Position, Rerun, rerun_start
from rlstable.runner.host_state import HostState
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result
from rlstable.supervise import incident as incidents
from rlstable.supervise.incident import Incident
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile")
FAULT = {"fault": "physics", "probability": 0.008}


def trained(run_dir: Path, iterations: int = 6, **sections: Any) -> list[Incident]:
    """A run that saves every other iteration, and its incidents."""
    defaults: dict[str, Any] = {
        "guards": {},
        "devices": 1,
        "env": {"kwargs": FAULT, "episode_length": 200},
        "total_steps": iterations * 64,
        "eval": {"num_evals": 0},
        "logging": {"console": "off"},
        "checkpoint": {"every": 2, "keep": 20},
        "supervise": {"recovery": {"enabled": False}, "incident": {"window": 1}},
    }
    TrainingLoop(tiny_config(**defaults | sections), run_dir).run()
    folders = (run_dir / "incidents").iterdir()
    return [incidents.read(path) for path in sorted(folders, key=lambda path: int(path.name.split("-")[1]))]


def files(folder: Path) -> dict[str, tuple[int, float]]:
    """All files in a folder except the history, with sizes and times."""
    found = (path for path in folder.rglob("*") if not path.name.startswith("history."))
    return {str(path): (path.stat().st_size, path.stat().st_mtime) for path in found if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Incident]:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(run: list[Incident]) -> History:
    """History of an incident with no checkpoint before its episode."""
    assert run[1].folder.name == "3-2"
    return make(run[1], 100, lambda _: None)


@pytest.fixture(scope="module")
def resumed(run: list[Incident]) -> History:
    """History of an incident with a checkpoint before it."""
    assert run[-1].folder.name == "6-5"
    before = files(run[-1].folder.parent.parent)
    history = make(run[-1], 100, lambda _: None)
    assert files(run[-1].folder.parent.parent) == before
    return history


@pytest.mark.slow
def test_history_starts_at_the_beginning_of_the_run_if_there_is_no_checkpoint(whole: History) -> None:
    expected = {"steps": 20, "asked": 100, "begins": "where its episode begins", "from_iteration": 0, "exact": True}
    assert {name: whole.facts[name] for name in expected} == expected
    assert whole.arrays["before/info/steps"].tolist() == list(range(20))


def test_history_starts_at_the_checkpoint_before_the_episode(resumed: History) -> None:
    """Across the end of an iteration: the incident is in the second step of the sixth."""
    expected = {"steps": 6, "asked": 100, "begins": "where its episode begins", "from_iteration": 4, "exact": True}
    assert {name: resumed.facts[name] for name in expected} == expected


@pytest.mark.parametrize("which", ["whole", "resumed"])
def test_history_steps_are_consecutive_and_end_in_the_incident(which: str, request: Any) -> None:
    """Computed by the environment, bit for bit."""
    history: History = request.getfixturevalue(which)
    old = history.arrays
    physics = Physics(*(old[f"before/pipeline_state/{name}"] for name in ("q", "qd", "warm_start")))
    key, zero = old["before/info/fault_key"], np.zeros(len(old["reward"]), np.float32)
    states = State(physics, old["before/obs"], zero, zero, {"distance": zero}, {"fault_key": key})
    after = jax.jit(jax.vmap(PointMass(**FAULT).step))(states, old["action"])
    found = {
        "before/obs": after.obs,
        "before/info/fault_key": after.info["fault_key"],
        **{f"before/pipeline_state/{name}": getattr(after.pipeline_state, name) for name in ("q", "qd", "warm_start")},
    }
    for name, came_to in found.items():
        then = np.concatenate([old[name][1:], history.incident.arrays[name][None]])
        assert np.asarray(came_to).tobytes() == then.tobytes(), name
    assert np.asarray(after.reward).tobytes() == old["reward"].tobytes()
    assert not old["done"].any()


def test_saved_history_is_read_and_damage_is_an_error(resumed: History, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(resumed.incident.folder, folder)
    copy = resumed.incident._replace(folder=folder)
    found = read(copy)
    assert found.facts == json.loads(json.dumps(resumed.facts)) | {"arrays": found.facts["arrays"]}
    jax.tree.map(np.testing.assert_array_equal, found.arrays, resumed.arrays)
    with np.load(folder / "history.npz", allow_pickle=False) as arrays:
        assert set(arrays) == set(resumed.arrays)
    (folder / "history.npz").write_bytes((folder / "history.npz").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"the checksum of history\.npz is wrong"):
        read(copy)
    (folder / "history.npz").unlink()
    with pytest.raises(ConfigError, match=r"there is no history yet; run .* --history"):
        read(copy)


@pytest.mark.slow
def test_history_across_a_rollback_on_two_devices(tmp_path: Path) -> None:
    """The fourth iteration accepts no update and is rolled back to the second; the incident comes later."""
    incident = trained(
        tmp_path,
        iterations=12,  # of half as many actions
        devices=2,
        env={"kwargs": FAULT, "episode_length": 200, "action_repeat": 2},
        guards={"finite_update": {"patience": 1}},
        fault={"site": "gradient", "probability": 1.0, "start": 3, "iterations": 1},
        supervise={"recovery": {"every": 2}, "incident": {"window": 1}},
    )[-1]
    assert (incident.facts["iteration"], incident.facts["lost_iterations"], incident.facts["devices"]) == (5, 2, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    told: list[str] = []
    history = make(incident, 100, told.append)
    assert told == ["compiling, then training iterations 1 to 5 and 2 rolled back iterations again"]
    assert history.facts["exact"] and history.facts["from_iteration"] == 0
    assert history.arrays["before/info/steps"].tolist() == np.repeat(np.arange(0, 32, 2), 2).tolist()


@pytest.mark.slow
def test_history_starts_at_a_change_of_precision(tmp_path: Path) -> None:
    """The second iteration trains with physics in float64, and so does the history."""
    incident = trained(
        tmp_path,
        iterations=2,
        env={"kwargs": FAULT | {"probability": 0.03}, "episode_length": 200},
        supervise={
            "recovery": {"enabled": False},
            "ladder": {"patience": 1, "max_invalid": 0.01, "matmul": ["default", "x64"]},
            "incident": {"window": 1},
        },
    )[1]
    assert incident.facts["precision"]["matmul"] == "x64"
    history = make(incident, 100, lambda _: None)
    assert history.facts["exact"] and history.facts["begins"] == "where the precision of training changed"
    assert history.arrays["before/pipeline_state/q"].dtype == np.float64
    assert history.arrays["before/obs"].dtype == np.float32


def altered(history: History) -> Any:
    """Recorded steps with one observation changed."""
    bad = history.incident.arrays
    steps = {name: np.concatenate([x, bad.get(name, x[-1])[None]]) for name, x in history.arrays.items()}
    steps["before/obs"][-1, 0] *= 1.5
    return lambda *_: Rerun(steps, Position(4, 0))


def test_history_that_differs_from_the_run_says_so(resumed: History, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(histories, "run_again", altered(resumed))
    versions = resumed.incident.facts["versions"]
    older = resumed.incident._replace(
        folder=tmp_path, facts=resumed.incident.facts | {"versions": versions | {"jax": "0.0.1"}}
    )
    history = make(older, 100, lambda _: None)
    assert not history.facts["exact"]
    said = trend.lines(history)[-1].plain
    assert said.startswith("  not exact: 1 of 15 arrays differ from the run's, most of all obs, by ")
    assert said.endswith(f"; other versions (jax 0.0.1 -> {versions['jax']})")
    same = make(resumed.incident._replace(folder=tmp_path), 100, lambda _: None)
    assert trend.lines(same)[-1].plain.endswith("custom guards, or a run resumed with another configuration")


def test_history_is_limited_by_max_mb(resumed: History, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(histories, "run_again", altered(resumed))
    row = sum(x[0].nbytes for x in resumed.arrays.values())
    incident = small(resumed.incident, max_mb=2.5 * row / 1e6)._replace(folder=tmp_path)
    history = make(incident, 100, lambda _: None)
    assert history.facts["steps"] == 2
    assert history.facts["begins"] == "where supervise.incident.max_mb has no more room"
    np.testing.assert_array_equal(history.arrays["action"], resumed.arrays["action"][-2:])


def small(incident: Incident, max_mb: float) -> Incident:
    supervise = incident.config.supervise
    own = supervise.incident.model_copy(update={"max_mb": max_mb})
    config = incident.config.model_copy(update={"supervise": supervise.model_copy(update={"incident": own})})
    return incident._replace(config=config)


# --- where to begin


@pytest.mark.parametrize(
    ("before", "reach", "place"),
    [
        (6, 1, 4),  # the newest before the incident
        (5, 1, 2),  # the newest is too close
        (4, 2, 0),  # no checkpoint is far enough back
        (2, 0, 0),  # no checkpoint is before the incident
    ],
)
def test_history_starts_at_the_newest_checkpoint_that_is_far_enough_back(
    run: list[Incident], before: int, reach: int, place: int
) -> None:
    assert rerun_start(run[0].folder.parent.parent, before, reach, print) == Position(place, 0)


def test_history_skips_and_reports_a_damaged_checkpoint(run: list[Incident], tmp_path: Path) -> None:
    shutil.copytree(run[0].folder.parent.parent / "checkpoints", tmp_path / "checkpoints")
    next(path for path in tmp_path.glob("checkpoints/4/state/d/*")).write_bytes(b"torn")
    told: list[str] = []
    assert rerun_start(tmp_path, 6, 1, told.append) == Position(2, 0)
    assert len(told) == 1 and told[0].startswith("checkpoint 4 is damaged (")
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    assert rerun_start(tmp_path, 6, 1, told.append) == Position(0, 0)


# --- mistakes


def moved(incident: Incident, folder: Path) -> Incident:
    shutil.copytree(incident.folder, folder)
    return incident._replace(folder=folder)


def test_history_of_an_incident_without_its_run_is_an_error(run: list[Incident], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the incident is not in a run folder, .* give runs/\.\.\./incidents/<name>"):
        make(moved(run[0], tmp_path / "incidents" / "1-1"), 10, print)


def test_history_of_an_incident_of_an_older_version_is_an_error(run: list[Incident]) -> None:
    facts = {name: x for name, x in run[0].facts.items() if name != "lost_iterations"}
    with pytest.raises(ConfigError, match="only incidents of newer runs can have a history"):
        make(run[0]._replace(facts=facts), 10, print)


def test_history_from_a_checkpoint_of_another_configuration_is_an_error(run: list[Incident], tmp_path: Path) -> None:
    """The error names the folder of the run, not the temporary folder."""
    config = run[-1].config
    network = config.network.model_copy(update={"policy_hidden_layer_sizes": (9,)})
    with pytest.raises(ConfigError, match="does not fit this configuration") as caught:
        make(run[-1]._replace(config=config.model_copy(update={"network": network})), 100, print)
    assert str(run[-1].folder.parent.parent / "checkpoints" / "4") in str(caught.value)


def test_history_of_a_run_with_more_devices_is_an_error(run: list[Incident]) -> None:
    facts = run[0].facts | {"devices": 64}
    with pytest.raises(ConfigError, match="devices: 64 requested, but only 8 cpu available"):
        make(run[0]._replace(facts=facts), 10, print)


def test_history_is_an_error_if_the_recomputed_run_ends_before_the_incident(
    run: list[Incident], monkeypatch: Any
) -> None:
    """As with other versions or changed code."""

    class Ended:
        single = types.SimpleNamespace(host=HostState(iteration=2))

        def __init__(self, *_: Any, **__: Any):
            pass

        def run(self) -> Any:
            return Result(StopReason.physics_unstable, Path(), 128, {}, [])

    monkeypatch.setattr(rerun, "TrainingLoop", Ended)
    with pytest.raises(ConfigError, match=r"ended after 2 iterations \(physics_unstable: .*\), before the incident's"):
        make(run[1], 100, print)


@pytest.mark.parametrize("number", ["0", "1.5", "incidents/1-1"])
def test_invalid_number_of_history_steps_is_an_error(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["incidents/1-1", f"--history={number}"])
    assert ended.value.code == 2
    assert f"{number!r} is not a number of steps" in capsys.readouterr().err.splitlines()[-1]


# --- what is said


def growing(history: History, factors: dict[str, list[float]]) -> History:
    """A history of ten steps of ones, except for the given factors in the last steps."""
    bad = dict(history.incident.arrays)
    arrays = {name: np.ones((10, *x.shape[1:]), x.dtype) for name, x in history.arrays.items()}
    for name, x in arrays.items():
        if name in bad:
            bad[name] = np.ones_like(bad[name])
        for ago, factor in enumerate(reversed(factors.get(name, []))):
            (x[-ago], bad[name])[ago == 0][...] = factor
    facts = history.facts | {"steps": 10, "asked": 10}
    return History(history.incident._replace(arrays=bad), facts, arrays)


Q, QD = "before/pipeline_state/q", "before/pipeline_state/qd"


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ({}, "no quantity left its usual range before the bad step: the change was sudden"),
        ({Q: [20] * 5, QD: [0] * 6}, "pipeline_state/q was the first to leave its usual range for good, 4 steps"),
        ({Q: [50, 1, 1]}, "no quantity left its usual range"),  # it came back
        ({Q: [30]}, "pipeline_state/q was the first to leave its usual range for good, just before the bad step: 30,"),
        (
            {Q: [20, 40], QD: [11, 100, 1000, 1e4]},
            "pipeline_state/qd was the first to leave its usual range for good, 3 steps before the bad one: "
            "11, usually 1",
        ),
        ({Q: [11, 12], QD: [11, 12]}, "pipeline_state/qd was the first"),  # a velocity comes before a position
    ],
)
def test_history_names_the_first_quantity_that_left_its_usual_range(
    resumed: History, factors: dict[str, list[float]], said: str
) -> None:
    assert trend.first_unusual(growing(resumed, factors)).startswith(said)


def test_history_table_has_all_of_the_latest_steps(resumed: History, whole: History) -> None:
    assert [row["step"] for row in trend.rows(resumed)] == [-6, -5, -4, -3, -2, -1, 0]
    assert [row["step"] for row in trend.rows(whole)] == [-20, -15, -10, -8, -7, -6, -5, -4, -3, -2, -1, 0]
    assert list(trend.rows(whole)[0]) == ["step", "action", "pipeline_state/qd", "pipeline_state/q", "obs", "reward"]
    first, last = trend.rows(whole)[0], trend.rows(whole)[-1]
    assert first["reward"] == whole.arrays["reward"][0] and np.isnan(last["reward"])
    assert first["action"] == np.abs(whole.arrays["action"][0]).max()
    assert last["obs"] == np.abs(whole.incident.arrays["before/obs"]).max()


def test_history_command_prints_a_table_and_json(
    resumed: History, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(histories, "make", lambda incident, count, tell: asked.append(count) or resumed)
    main([str(resumed.incident.folder), "--history"])
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 120
    header = next(i for i, line in enumerate(lines) if line.split() == ["step", "action", "qd", "q", "obs", "reward"])
    assert [line.split()[0] for line in lines[header + 1 : header + 8]] == ["-6", "-5", "-4", "-3", "-2", "-1", "0"]
    assert "  the bad step at its end: bit for bit what the run had" in lines
    main([str(resumed.incident.folder), "--history", "7", "--json"])
    assert json.loads(capsys.readouterr().out)["history"] == json.loads(json.dumps(trend.as_data(resumed)))
    assert asked == [100, 7]
