"""The steps before a bad one, by training again: the run's own, bit for bit, and none of the run's files is touched."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import Physics, PointMass, State, tiny_config

from rlstable.config import ConfigError
from rlstable.replay import history as histories
from rlstable.replay import trend
from rlstable.replay.__main__ import main
from rlstable.replay.history import History, make, read
from rlstable.replay.rerun import Place, Rerun, starting_place
from rlstable.runner import Runner
from rlstable.supervise import incident as incidents
from rlstable.supervise.incident import Incident

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
        "sinks": {"console": "off"},
        "checkpoint": {"every": 2, "keep": 20},
        "supervise": {"recovery": {"enabled": False}, "incident": {"window": 1}},
    }
    Runner(tiny_config(**defaults | sections), run_dir).run()
    folders = (run_dir / "incidents").iterdir()
    return [incidents.read(path) for path in sorted(folders, key=lambda path: int(path.name.split("-")[1]))]


def files(folder: Path) -> dict[str, tuple[int, float]]:
    """Everything in a folder but what a history adds, with sizes and times."""
    found = (path for path in folder.rglob("*") if not path.name.startswith("history."))
    return {str(path): (path.stat().st_size, path.stat().st_mtime) for path in found if path.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[Incident]:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(run: list[Incident]) -> History:
    """That of an incident with no checkpoint before its episode."""
    assert run[1].folder.name == "3-2"
    return make(run[1], 100, lambda _: None)


@pytest.fixture(scope="module")
def resumed(run: list[Incident]) -> History:
    """That of an incident with a checkpoint before it."""
    assert run[-1].folder.name == "6-5"
    before = files(run[-1].folder.parent.parent)
    history = make(run[-1], 100, lambda _: None)
    assert files(run[-1].folder.parent.parent) == before
    return history


def test_from_the_beginning_of_the_run(whole: History) -> None:
    expected = {"steps": 20, "asked": 100, "begins": "where its episode begins", "from_iteration": 0, "exact": True}
    assert {name: whole.facts[name] for name in expected} == expected
    assert whole.arrays["before/info/steps"].tolist() == list(range(20))


def test_from_a_checkpoint(resumed: History) -> None:
    """Over the end of an iteration: the incident is in the second step of the sixth."""
    expected = {"steps": 6, "asked": 100, "begins": "where its episode begins", "from_iteration": 4, "exact": True}
    assert {name: resumed.facts[name] for name in expected} == expected


@pytest.mark.parametrize("which", ["whole", "resumed"])
def test_every_step_leads_into_the_next_and_the_last_into_the_incident(which: str, request: Any) -> None:
    """By the environment itself, bit for bit."""
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


def test_what_is_written_is_read_and_damage_is_one_clear_error(resumed: History, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(resumed.incident.folder, folder)
    copy = resumed.incident._replace(folder=folder)
    found = read(copy)
    assert found.facts == json.loads(json.dumps(resumed.facts)) | {"arrays": found.facts["arrays"]}
    jax.tree.map(np.testing.assert_array_equal, found.arrays, resumed.arrays)
    with np.load(folder / "history.npz", allow_pickle=False) as arrays:
        assert set(arrays) == set(resumed.arrays)
    (folder / "history.npz").write_bytes((folder / "history.npz").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"history\.npz does not have its checksum"):
        read(copy)
    (folder / "history.npz").unlink()
    with pytest.raises(ConfigError, match=r"has no history yet; make it by .* --history"):
        read(copy)


def test_through_a_rollback_on_two_devices_with_repeats(tmp_path: Path) -> None:
    """The run goes back after its third iteration, and has its second incident in the attempt after that."""
    found = trained(
        tmp_path,
        iterations=5,
        devices=2,
        env={"kwargs": FAULT, "episode_length": 200, "action_repeat": 2},
        checkpoint={"every": 2, "keep": 20},
    )
    for incident in found:
        print(incident.folder.name, incident.arrays["before/info/steps"], incident.facts["device"], incident.facts["repeat"])
    assert 0


# --- where to begin


@pytest.mark.parametrize(
    ("before", "reach", "place"),
    [
        (6, 1, 4),  # the newest before it
        (5, 0, 4),
        (5, 1, 2),  # the one before that is near enough
        (5, 2, 2),
        (4, 2, 0),  # from none is it all ahead, and the beginning is as near
        (4, 1, 2),
        (7, 3, 2),
        (2, 0, 0),  # none is before it
    ],
)
def test_the_newest_checkpoint_from_which_all_is_ahead(
    run: list[Incident], before: int, reach: int, place: int
) -> None:
    assert starting_place(run[0].folder.parent.parent, before, reach, print) == Place(place, 0)


def test_a_damaged_checkpoint_is_told_and_passed_over(run: list[Incident], tmp_path: Path) -> None:
    shutil.copytree(run[0].folder.parent.parent / "checkpoints", tmp_path / "checkpoints")
    next(path for path in tmp_path.glob("checkpoints/4/state/d/*")).write_bytes(b"torn")
    told: list[str] = []
    assert starting_place(tmp_path, 6, 1, told.append) == Place(2, 0)
    assert len(told) == 1 and told[0].startswith("checkpoint 4 is damaged (")
    shutil.rmtree(tmp_path / "checkpoints" / "2")
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    assert starting_place(tmp_path, 6, 1, told.append) == Place(0, 0)
