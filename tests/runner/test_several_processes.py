"""Several processes train one run: like one process with all devices, with one writer and one stop reason."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import checkpoints, events, require_same, rows
from teams import Team

from rlstable.io.run_folder import read_result, steps_in

ROLLBACK = [
    "fault.site=reward", "fault.probability=1.0", "fault.start=2", "fault.iterations=2", "guards.storm.patience=2",
    "supervise.recovery.every=2", "supervise.ladder.enabled=false",
]  # fmt: skip
ENDLESS = ["total_steps=100_000_000"]
ENDED = (1, -6)  # exit codes of a process whose peer is lost: by the error of its collective, or by JAX's abort
_TOLERANCE = 1e-6
# Sums of rewards over an episode are ten times as large as parameters.
_OF_EPISODES = "env_state/info/episode_metrics"


def require_alike(ours: Path, theirs: Path, part: str = "") -> None:
    """Requires equal checkpoints and rows up to the order in which the devices add numbers.

    Args:
        ours: A run folder.
        theirs: Another run folder.
        part: Start of the paths of the arrays to compare.
    """
    a, b = checkpoints(ours), checkpoints(theirs)
    assert list(a) == list(b)
    for step in a:
        (arrays, _), (others, _) = a[step], b[step]
        assert arrays.keys() == others.keys()
        for path in (path for path in arrays if path.startswith(part)):
            array = arrays[path]
            scale = 10.0 if path.startswith(_OF_EPISODES) else 1.0
            np.testing.assert_allclose(array, others[path], rtol=_TOLERANCE, atol=scale * _TOLERANCE, err_msg=path)
    our_rows, their_rows = rows(ours), rows(theirs)
    assert len(our_rows) == len(their_rows)
    for row, other in zip(our_rows, their_rows, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            close = value is other[name] or value == pytest.approx(other[name], rel=1e-5, abs=_TOLERANCE)
            assert close, (row["step"], name, value, other[name])


@pytest.mark.slow
def test_two_processes_with_two_devices_train_through_a_rollback_like_one_with_four(tmp_path: Path) -> None:
    pair = Team(tmp_path / "pair", ROLLBACK)
    alone = Team(tmp_path / "alone", ROLLBACK, processes=1, devices=4)
    assert pair.ends() == [0, 0], pair.texts()
    assert alone.ends() == [0], alone.texts()
    assert [event["to_iteration"] for event in events(tmp_path / "pair", "rolled_back")] == [2]
    require_alike(tmp_path / "pair", tmp_path / "alone")


@pytest.mark.slow
def test_signal_to_one_of_two_processes_ends_both_as_preempted_with_one_checkpoint(tmp_path: Path) -> None:
    args = [*ENDLESS, "checkpoint.every=1000"]
    pair = Team(tmp_path / "pair", args, moments={1: {"at": "iteration", "n": 3, "how": "SIGTERM"}})
    assert pair.ends() == [143, 143], pair.texts()
    result = read_result(tmp_path / "pair")
    assert result is not None
    assert result["stop_reason"] == "preempted"
    # A thread receives the signal, perhaps after the processes have agreed to continue.
    assert steps_in(tmp_path / "pair" / "checkpoints") in ([3], [4])
    assert result["step"] == 64 * steps_in(tmp_path / "pair" / "checkpoints")[0]


@pytest.mark.slow
def test_run_resumed_by_one_process_and_by_two_again_ends_like_the_uninterrupted_run(tmp_path: Path) -> None:
    args = ["total_steps=640", *ROLLBACK]
    whole = Team(tmp_path / "whole", args)
    assert whole.ends() == [0, 0], whole.texts()
    chain = tmp_path / "chain"
    first = Team(chain, args, moments={0: {"at": "iteration", "n": 5}}).ends()
    assert first[0] == -9 and first[1] in ENDED
    assert Team(chain, args, processes=1, devices=4, moments={0: {"at": "iteration", "n": 3}}).ends() == [-9]
    end = Team(chain, args)
    assert end.ends() == [0, 0], end.texts()
    assert len(events(chain, "resumed")) == 2
    require_alike(chain, tmp_path / "whole")


def moment(draw: random.Random) -> dict[str, Any]:
    compiled = {"at": "compile", "what": "training", "seconds": round(draw.uniform(0.0, 0.8), 3)}
    return draw.choice([{"at": "iteration", "n": draw.randint(1, 6)}, compiled, {"at": "rollback", "n": 1, "step": 0}])


@pytest.mark.slow
def test_run_whose_processes_are_killed_at_random_ends_in_the_same_bits(tmp_path: Path) -> None:
    args = ["total_steps=640", *ROLLBACK]
    whole = Team(tmp_path / "whole", args)
    assert whole.ends() == [0, 0], whole.texts()
    draw = random.Random(36)  # kills either process while it compiles
    for victim in draw.sample([0, 1, 0, 1], 4):
        team = Team(tmp_path / "killed", args, moments={victim: moment(draw)})
        codes = team.ends(patience=120)
        if codes != [0, 0]:  # else the moment did not come
            assert codes[victim] == -9 and codes[1 - victim] in ENDED, team.texts()
            assert team.seconds_after_first_end < 60
    Team(tmp_path / "killed", args).ends()
    require_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_lost_process_is_one_line_and_nothing_saved_is_lost(tmp_path: Path) -> None:
    pair = Team(tmp_path / "pair", ENDLESS, moments={1: {"at": "iteration", "n": 5}})
    codes = pair.ends()
    assert codes[1] == -9 and codes[0] in ENDED, pair.texts()
    assert pair.seconds_after_first_end < 60
    if codes[0] == 1:  # JAX has not aborted it before
        assert re.search(r"^rlstable: error: process 0 has lost another process: .+$", pair.texts()[0], re.M)
        assert (read_result(tmp_path / "pair") or {})["stop_reason"] == "error"
    assert steps_in(tmp_path / "pair" / "checkpoints")[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("how", "code"), [("error", 1), ("memory", 10)])
def test_failure_of_one_process_ends_both(tmp_path: Path, index: int, how: str, code: int) -> None:
    pair = Team(tmp_path / "pair", ENDLESS, moments={index: {"at": "iteration", "n": 3, "how": how}})
    codes = pair.ends()
    assert codes[index] == code and codes[1 - index] in (code, *ENDED), pair.texts()
    assert pair.seconds_after_first_end < 60
    if codes[0] == code:
        result = read_result(tmp_path / "pair")
        assert result is not None
        assert result["stop_reason"] == {"error": "error", "memory": "out_of_memory"}[how]
        text = {"error": f"process {index}: RuntimeError: a fault on purpose", "memory": "refused memory"}[how]
        assert text in result["advice"]


@pytest.mark.slow
def test_signal_during_compilation_ends_both_processes(tmp_path: Path) -> None:
    compiling = {"at": "compile", "what": "training", "seconds": 0.0, "how": "SIGTERM"}
    pair = Team(tmp_path / "pair", ENDLESS, moments={1: compiling})
    assert pair.ends() == [143, 143], pair.texts()
    assert (read_result(tmp_path / "pair") or {})["stop_reason"] == "preempted"


@pytest.mark.slow
def test_processes_with_different_sources_do_not_train_together(tmp_path: Path) -> None:
    """Both import a module of the same name, whose environments differ."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, sign in zip(folders, "+-", strict=True):
        folder.mkdir()
        (folder / "mine.py").write_text(f"from toys import PointMass\nclass Mine(PointMass):\n    sign = {sign}1\n")
    own = {i: ["env.name=mine:Mine"] for i in range(2)}
    pair = Team(tmp_path / "pair", own_args=own, own_paths={i: folder for i, folder in enumerate(folders)})
    assert pair.ends() == [2, 2], pair.texts()
    assert all("rlstable: sources: is '" in text for text in pair.texts())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["devices=2"], "devices: 2 requested, but 2 processes train on all of their 4 devices; set devices=null"),
        (["seeds=2"], "seeds: 2 seeds train together in one process, not in 2; set seeds=1"),
        (["ppo.num_envs=2"], "ppo.num_envs: 2 does not divide evenly among 4 devices; 4 would fit"),
    ],
)
def test_configuration_that_several_processes_cannot_train_is_one_line(
    tmp_path: Path, args: list[str], message: str
) -> None:
    pair = Team(tmp_path / "pair", args)
    assert pair.ends() == [2, 2], pair.texts()
    assert all(f"rlstable: {message}" in text for text in pair.texts())
    assert not (tmp_path / "pair").exists()


@pytest.mark.slow
def test_processes_with_different_configurations_name_the_key(tmp_path: Path) -> None:
    pair = Team(tmp_path / "pair", own_args={0: ["seed=0"], 1: ["seed=1"]})
    assert pair.ends() == [2, 2], pair.texts()
    message = "seed: is 1 in process 1 and 0 in process 0; start all processes with the same command"
    assert all(message in text for text in pair.texts())


@pytest.mark.slow
def test_process_that_finds_no_others_ends_with_one_line(tmp_path: Path) -> None:
    args = ["distributed.num_processes=3", "distributed.timeout=12.5"]
    alone = Team(tmp_path / "alone", args)
    assert alone.ends() == [2, 2], alone.texts()
    assert all("the processes have not found each other within 12.5 s" in text for text in alone.texts())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "mjx"])
def test_physics_of_mujoco_runs_on_the_devices_of_each_process(tmp_path: Path, backend: str) -> None:
    args = ["env=inverted_pendulum", "env.source=brax", "env.name=inverted_pendulum", f"env.backend={backend}"]
    args += ["env.episode_length=100", "ppo=default", "network=small"]
    pair = Team(tmp_path / "pair", args)
    assert pair.ends() == [0, 0], pair.texts()
    alone = Team(tmp_path / "alone", args, processes=1, devices=4)
    assert alone.ends() == [0], alone.texts()
    require_alike(tmp_path / "pair", tmp_path / "alone", "params")
