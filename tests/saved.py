"""Reads the files that a run leaves in its folder, and compares those of two runs bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.io.run_folder import read_result, steps_in
from rlstable.io.store import open_manager, read_arrays, read_manifest

# Metrics and host state that depend on the clock, the process or the machine.
_OF_THE_MACHINE = (
    "time", "memory/", "training/sps", "training/walltime", "eval/epoch_eval_time", "eval/sps", "eval/walltime",
)  # fmt: skip
_OF_THE_PROCESS = ("elapsed", "evaluated", "wandb_run_id")

Checkpoint = tuple[dict[str, np.ndarray], dict[str, Any]]


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; empty lines are left out."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def events(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    """The events of some kinds, or all, without their times."""
    found = lines(run_dir / "events.jsonl")
    return [
        {key: event[key] for key in event if key != "time"} for event in found if event["kind"] in kinds or not kinds
    ]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The logged rows without the metrics that depend on the clock or the machine."""
    found = lines(run_dir / "metrics.jsonl")
    return [{key: row[key] for key in row if not key.startswith(_OF_THE_MACHINE)} for row in found]


def result(run_dir: Path) -> dict[str, Any]:
    found = read_result(run_dir)
    assert found is not None
    return found


def saved(run_dir: Path) -> list[int]:
    """The iterations of all checkpoints."""
    return steps_in(run_dir / "checkpoints")


def checkpoints(run_dir: Path) -> dict[int, Checkpoint]:
    """By iteration: all saved arrays by path, and the host state."""
    return {step: checkpoint(run_dir, step) for step in saved(run_dir)}


def checkpoint(run_dir: Path, iteration: int | None = None) -> Checkpoint:
    """The saved arrays by path and the host state of an iteration, by default the last."""
    folder = run_dir / "checkpoints"
    step = steps_in(folder)[-1] if iteration is None else iteration
    manager = open_manager(folder, None)
    try:
        manifest = read_manifest(manager, folder, step)
        host = manifest.host
        own = {name: value for name, value in host["host"].items() if name not in _OF_THE_PROCESS}
        return read_arrays(manager, step, "state", manifest.state), own | {
            name: host[name] for name in ("step", "return", "last_good")
        }
    finally:
        manager.close()


def require_same_checkpoint(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert ours[1] == theirs[1]
    assert ours[0].keys() == theirs[0].keys()
    for path, array in ours[0].items():
        other = theirs[0][path]
        assert (array.dtype, array.shape) == (other.dtype, other.shape), path
        assert array.tobytes() == other.tobytes(), path


def require_same(ours: Path, theirs: Path) -> None:
    """Requires that all checkpoints and all logged rows are equal, bit for bit."""
    a, b = checkpoints(ours), checkpoints(theirs)
    assert list(a) == list(b)
    for step, found in a.items():
        require_same_checkpoint(found, b[step])
    assert rows(ours) == rows(theirs)
    assert not [path.name for path in (ours / "checkpoints").iterdir() if not path.name.isdigit()]
