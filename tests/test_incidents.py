"""Runs whose simulations become bad save incidents: one per window, at most `keep`, and none twice."""

from __future__ import annotations

import errno
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from toys import tiny_config

from rlstable.config import Config
from rlstable.replay.engines import step_again
from rlstable.replay.report import compare
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise import incident
from rlstable.supervise.incident import IncidentMemory, read
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64


def config(
    iterations: int = 6, fault: dict[str, Any] | None = None, incidents: dict[str, Any] | None = None, **sections: Any
) -> Config:
    """A tiny run in which about one step in fifty goes bad."""
    kwargs = {"fault": "physics", "probability": 0.02} if fault is None else fault
    defaults: dict[str, Any] = {
        "guards": {},
        "devices": 1,
        "total_steps": iterations * ITERATION,
        "eval": {"num_evals": 0},
        "logging": {"console": "off"},
        "env": {"kwargs": kwargs},
        "supervise": {"recovery": {"enabled": False}, "incident": {"window": 2, **(incidents or {})}},
    }
    return tiny_config(**defaults | sections)


def folders(run_dir: Path) -> list[str]:
    path = run_dir / "incidents"
    return sorted((entry.name for entry in path.iterdir()), key=lambda x: int(x.split("-")[1])) if path.exists() else []


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingLoop:
    runner = TrainingLoop(config(), tmp_path_factory.mktemp("run"))
    runner.run()
    return runner


def test_run_saves_one_incident_per_window_with_an_event(run: TrainingLoop) -> None:
    told = events(run.run_dir, "incident")
    assert [Path(event["path"]).name for event in told] == folders(run.run_dir)
    iterations = [int(name.split("-")[0]) for name in folders(run.run_dir)]
    assert len(iterations) >= 2 and all(b - a >= 2 for a, b in itertools.pairwise(iterations))
    tripped = {event["step"] // ITERATION for event in events(run.run_dir, "guard_tripped")}
    assert iterations[0] == min(tripped) and set(iterations) <= tripped
    assert told[0]["causes"][0] == "quarantine/physics"
    assert told[0]["first"] == "pipeline_state/q[0] = nan (not finite)"
    assert run.single.host.incidents == IncidentMemory(len(iterations), iterations[-1])


def test_incident_names_the_environment_step_and_cause(run: TrainingLoop) -> None:
    found = read(run.run_dir / "incidents" / folders(run.run_dir)[0])
    facts = found.facts
    assert (facts["seed"], facts["fault"], facts["versions"]["rlstable"]) == (0, None, "0.1.0")
    assert found.config == run.config
    assert 0 <= facts["environment"] < 8 and facts["device"] == 0 and facts["repeat"] == 0
    assert 0 <= facts["unroll"] < 2 and 0 <= facts["step"] < 4
    np.testing.assert_array_equal(found.arrays["action"], found.arrays["after/pipeline_state/warm_start"])


@pytest.mark.slow
def test_each_device_saves_its_incident_in_the_order_of_steps(tmp_path: Path) -> None:
    fault = {"fault": "physics", "probability": 0.3}
    TrainingLoop(config(1, fault, devices=2), tmp_path / "all").run()
    found = [read(tmp_path / "all" / "incidents" / name).facts for name in folders(tmp_path / "all")]
    assert [facts["environment"] // 4 for facts in found] == [facts["device"] for facts in found]
    assert sorted(facts["device"] for facts in found) == [0, 1]
    steps = [(facts["unroll"], facts["step"]) for facts in found]
    assert steps == sorted(steps)
    TrainingLoop(config(2, fault, {"keep": 1, "window": 1}, devices=2), tmp_path / "one").run()
    assert folders(tmp_path / "one") == ["1-1"]


def test_two_seeds_on_two_devices_save_the_incidents_and_pools_of_two_seeds_on_one_device(tmp_path: Path) -> None:
    env = {"kwargs": {"fault": "physics", "probability": 0.02}, "reset": "pool", "reset_pool_refresh": 2}
    found, pools = [], []
    for devices in (1, 2):
        fleet = TrainingLoop(config(seeds=2, devices=devices, env=env), tmp_path / str(devices))
        first = jax.device_get(fleet.seeds[1].state.reset_pool)
        fleet.run()
        pools.append([jax.device_get(seed.state.reset_pool) for seed in fleet.seeds.values()])
        refilled = jax.tree.map(lambda a, b: not np.array_equal(a, b), first, pools[-1][1])
        assert any(jax.tree.leaves(refilled))
        of_seeds = [tmp_path / str(devices) / f"seed-{seed}" for seed in range(2)]
        found.append([[(name, read(own / "incidents" / name)) for name in folders(own)] for own in of_seeds])
    jax.tree.map(np.testing.assert_array_equal, *pools)
    for one, two in zip(*found, strict=True):
        assert [name for name, _ in one] == [name for name, _ in two] != []
        # Programs for one seed and for two seeds round differently, so only the first incident has equal numbers.
        (_, ours), (_, theirs) = one[0], two[0]
        assert {key: ours.facts[key] for key in ("seed", "environment", "device", "unroll", "step")} == {
            key: theirs.facts[key] for key in ("seed", "environment", "device", "unroll", "step")
        }
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours.arrays, theirs.arrays)


def test_run_with_incidents_off_has_no_incident_folder_and_no_slot(tmp_path: Path) -> None:
    runner = TrainingLoop(config(2, incidents={"enabled": False}), tmp_path)
    runner.run()
    assert runner.single.state.incident is None
    assert folders(tmp_path) == [] and events(tmp_path, "guard_tripped")


@pytest.mark.slow
def test_full_disk_while_saving_an_incident_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(incident, "write", full)
    runner = TrainingLoop(config(4, {"fault": "reward", "probability": 0.3}), tmp_path)
    assert runner.run().stop_reason is StopReason.completed
    failed = events(tmp_path, "incident_failed")
    assert [event["iteration"] for event in failed] == [1, 3]  # tried again after the window
    assert "No space left" in failed[0]["error"]
    assert runner.single.host.incidents.count == 0


def test_resumed_run_neither_loses_nor_repeats_incidents(tmp_path: Path, run: TrainingLoop) -> None:
    """Incidents and training equal those of the uninterrupted run, bit for bit."""
    TrainingLoop(config(3), tmp_path).run()
    half = folders(tmp_path)
    resumed = TrainingLoop(config(6, resume="auto"), tmp_path)
    assert resumed.single.host.incidents.count == len(half) > 0
    resumed.run()
    assert folders(tmp_path) == folders(run.run_dir)
    for name in folders(tmp_path):
        ours, theirs = (read(folder / "incidents" / name).arrays for folder in (tmp_path, run.run_dir))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    jax.tree.map(np.testing.assert_array_equal, resumed.single.state.params, run.single.state.params)


def test_checkpoint_does_not_depend_on_whether_incidents_are_on(tmp_path: Path) -> None:
    TrainingLoop(config(2), tmp_path).run()
    assert (
        TrainingLoop(config(2, resume="auto", incidents={"enabled": False}), tmp_path).single.host.step == 2 * ITERATION
    )
    manifest = json.loads((tmp_path / "checkpoints/2/manifest/metadata").read_text())
    assert "incident" not in {keys[0] for keys, *_ in manifest["state"]}


@pytest.mark.slow
def test_incident_at_a_precision_raised_to_x64_is_float64(tmp_path: Path) -> None:
    """The incident is saved, and its step replayed, at the precision of the run at that time."""
    supervise = {
        "recovery": {"remedies": ["raise_precision"]},
        "ladder": {"matmul": ["x64"]},
        "incident": {"window": 1},
    }
    fault = {"fault": "observation", "probability": 0.2}
    guards = {"storm": {"max_share": 0.01, "patience": 1}}
    TrainingLoop(config(3, fault, supervise=supervise, guards=guards), tmp_path).run()  # without relief
    found = [read(tmp_path / "incidents" / name) for name in folders(tmp_path)]
    assert [one.facts["precision"]["matmul"] for one in found] == ["default", "x64"]
    kinds = [one.arrays["before/pipeline_state/q"].dtype.name for one in found]
    assert kinds == ["float32", "float64"]
    for one, engine in zip(found, kinds, strict=True):
        report = compare(one, step_again(one))
        assert report.same == f"{engine}: bit for bit what the run had"
        assert [bad.array for bad in report.bad[engine]] == ["obs"]
