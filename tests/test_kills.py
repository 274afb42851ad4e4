"""Runs that are killed at any moment and resumed end in the same bits as an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick_compile import environment as quick_environment

from rlstable.io.run_folder import read_result, seed_folders, steps_in
from rlstable.io.store import open_manager, read_arrays, read_manifest

ROOT = Path(__file__).resolve().parents[1]
ITERATION = 64
ITERATIONS = 60
TINY = [
    "env=import", "ppo=default", "env.name=toys:PointMass", "env.episode_length=12", "env.reset_pool_size=8",
    "resume=auto",
    "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]", "eval.num_envs=2",
    "eval.num_evals=12", "checkpoint.every=2", "checkpoint.keep=100", "logging.console=off",
]  # fmt: skip
# Two rollbacks: a storm of seven iterations, with a patience of three.
STORM = [
    "fault.site=reward", "fault.probability=1.0", "fault.start=6", "fault.iterations=7", "guards.storm.patience=3",
    "supervise.recovery.every=3", "supervise.recovery.relax_after=5",
]  # fmt: skip
# Metrics that depend on the clock or the machine, by the start of their names.
UNLIKE = ("time", "memory/", "training/sps", "training/walltime", "eval/epoch_eval_time", "eval/sps",
          "eval/walltime")  # fmt: skip

# Host state that depends on the clock or the process.
_OWN = ("elapsed", "evaluated", "wandb_run_id")

Moment = dict[str, Any]


def start(run_dir: Path, args: Sequence[str], moment: Moment | None = None) -> subprocess.Popen[str]:
    """Starts the command in another process; without a moment it is not killed."""
    devices = next((arg.split("=")[1] for arg in args if arg.startswith("devices=")), "1")
    environment = os.environ | quick_environment()
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, str(ROOT / "tests" / "deadly.py"), json.dumps(moment or {"at": "end"})]
    total = [] if any(arg.startswith("total_steps=") for arg in args) else [f"total_steps={ITERATIONS * ITERATION}"]
    return subprocess.Popen(
        [*command, *TINY, *total, *args, f"hydra.run.dir={run_dir}"],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def ends(process: subprocess.Popen[str]) -> int:
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (0, 75, -9), output
    return process.returncode


def kill(run_dir: Path, args: Sequence[str], moments: Sequence[Moment]) -> None:
    """Starts the run once per moment and kills it, then once more to its end."""
    for moment in moments:
        assert ends(start(run_dir, args, moment)) == -9, f"the run ended before {moment}"
    assert ends(start(run_dir, args)) == 0


def resumed_at(run_dir: Path) -> list[int]:
    """Iterations at which the run was resumed, without starts that found no checkpoint."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [event["iteration"] for event in events if event["kind"] == "resumed"]


def checkpoints(run_dir: Path) -> dict[int, tuple[dict[str, np.ndarray], dict[str, Any]]]:
    """By iteration: all saved arrays by path, and the host state."""
    folder = run_dir / "checkpoints"
    manager = open_manager(folder, None)
    found = {}
    for step in steps_in(folder):
        manifest = read_manifest(manager, folder, step)
        host = manifest.host
        own = {name: value for name, value in host["host"].items() if name not in _OWN}
        rest = {name: host[name] for name in ("step", "return", "last_good")}
        found[step] = read_arrays(manager, step, "state", manifest.state), own | rest
    manager.close()
    return found


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Logged rows without the metrics that depend on the clock or the machine."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(UNLIKE)} for line in lines]


def require_same(ours: Path, theirs: Path) -> None:
    """Requires that all checkpoints and all logged rows are equal, bit for bit."""
    a, b = checkpoints(ours), checkpoints(theirs)
    assert list(a) == list(b)
    for step, (arrays, host) in a.items():
        others, other_host = b[step]
        assert host == other_host, step
        assert arrays.keys() == others.keys()
        for path, array in arrays.items():
            other = others[path]
            alike = (array.dtype, array.shape) == (other.dtype, other.shape) and array.tobytes() == other.tobytes()
            assert alike, f"{path} in checkpoint {step}"
    assert rows(ours) == rows(theirs)
    assert not [path.name for path in (ours / "checkpoints").iterdir() if not path.name.isdigit()]


@pytest.mark.slow
def test_run_killed_in_a_save_and_in_a_rollback_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Two kills, since each costs the start of a process."""
    args = [*STORM, "supervise.ladder.enabled=false"]  # every process would compile another precision too
    whole = start(tmp_path / "whole", args)
    moments = [
        {"at": "write", "n": 3, "step": 25},
        {"at": "rollback", "n": 1, "step": 20},
    ]
    kill(tmp_path / "killed", args, moments)
    assert ends(whole) == 0
    assert resumed_at(tmp_path / "killed") == [4, 6]
    left = read_result(tmp_path / "whole")
    assert left is not None and left["rollbacks"] == 2
    require_same(tmp_path / "killed", tmp_path / "whole")


# Settings of the runs that are killed five times each.
CHAINS: dict[str, list[str]] = {
    "healthy": ["devices=1"],
    "healthy, two devices": ["devices=2"],
    "two rollbacks": ["devices=1", *STORM],
    "two rollbacks, two devices": ["devices=2", *STORM],
    "little is kept": ["devices=1", *STORM, "checkpoint.keep=1", "checkpoint.keep_best=0", "checkpoint.every=3"],
    "in the foreground": ["devices=1", *STORM, "checkpoint.asynchronous=false", "env.reset=pool"],
}
KILLS = 5


def moments(seed: int, storm: bool) -> list[Moment]:
    """Five random moments that every run reaches; the first comes after a save."""
    draw = random.Random(seed)

    def saving() -> Moment:
        return {"at": "write", "n": draw.randint(2, 5), "step": draw.randint(1, 45)}

    def rolling_back() -> Moment:
        return {"at": "rollback", "n": 1, "step": draw.choice([0, draw.randint(1, 45)])}

    def other() -> Moment:
        compiled = draw.choice([("training", 0.8), ("evaluation", 0.1)])
        return draw.choice([
            {"at": "iteration", "n": draw.randint(1, 10)},
            {"at": "evaluation", "n": draw.randint(1, 2)},
            {"at": "compile", "what": compiled[0], "seconds": round(draw.uniform(0.0, compiled[1]), 3)},
            saving(),
        ])  # fmt: skip

    first = [rolling_back(), rolling_back()] if storm else [saving(), {"at": "evaluation", "n": 1}]
    return first + [other() for _ in range(KILLS - 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "chain"), list(enumerate(CHAINS)), ids=list(CHAINS))
def test_run_killed_five_times_at_random_ends_in_the_same_bits(tmp_path: Path, seed: int, chain: str) -> None:
    args = CHAINS[chain]
    whole = start(tmp_path / "whole", args)
    planned = moments(seed, storm="fault.site=reward" in args)
    kill(tmp_path / "killed", args, planned)
    assert ends(whole) == 0
    at = resumed_at(tmp_path / "killed")
    print(f"{chain}: resumed at {at} after {planned}")
    # Of five kills, at least four came after a save.
    assert len(at) >= KILLS - 1 and min(at) > 0
    require_same(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
def test_fleet_killed_between_the_saves_of_its_seeds_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Some seeds have saved and some have not; those behind catch up, and each ends in the same bits."""
    args = ["devices=1", "seeds=3", *STORM, "fault.seed=1", "supervise.ladder.enabled=false"]
    whole = start(tmp_path / "whole", args)
    planned = [
        {"at": "write", "n": 2, "step": 9},
        {"at": "write", "n": 7, "step": 25},
        {"at": "rollback", "n": 1, "step": 20},
        {"at": "iteration", "n": 4},
        {"at": "write", "n": 5, "step": 3},
    ]
    kill(tmp_path / "killed", args, planned)
    assert ends(whole) == 0
    assert all(resumed_at(folder) for folder in seed_folders(tmp_path / "killed"))
    for ours, theirs in zip(*map(seed_folders, (tmp_path / "killed", tmp_path / "whole")), strict=True):
        require_same(ours, theirs)
    assert [row["step"] for row in rows(tmp_path / "killed")] == [row["step"] for row in rows(tmp_path / "whole")]


@pytest.mark.slow
def test_run_killed_by_another_process_ends_in_the_same_bits(tmp_path: Path) -> None:
    """Kills from another process, when the folder shows rows, a checkpoint being written, or a rollback."""
    folder = tmp_path / "killed"
    args = [*STORM, f"total_steps={600 * ITERATION}", "checkpoint.keep=2"]

    def lines(name: str, text: str = "") -> int:
        path = folder / name
        return sum(text in line for line in path.read_text().splitlines()) if path.exists() else 0

    def writing(part: str) -> bool:
        return bool(list(folder.glob(f"checkpoints/*.orbax-checkpoint-tmp{part}")))

    seen: list[Callable[[], bool]] = [
        lambda: lines("events.jsonl", "rolled_back") == 1,
        lambda: lines("metrics.jsonl") >= 40 and writing(""),
        lambda: lines("metrics.jsonl") >= 70 and writing("/state*"),
        lambda: lines("metrics.jsonl") >= 100,
    ]
    whole = start(tmp_path / "whole", args)
    for condition in seen:
        process = start(folder, args)
        while process.poll() is None and not condition():
            time.sleep(0.001)
        process.kill()
        assert ends(process) == -9, "the run ended before the condition was met"
    assert ends(start(folder, args)) == 0
    assert ends(whole) == 0
    assert len(resumed_at(folder)) == len(seen)
    require_same(folder, tmp_path / "whole")
