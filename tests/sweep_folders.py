"""Folders of sweeps, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def add_run(folder: Path, curve: Mapping[int, float] | None = None, **settings: Any) -> None:
    """Writes the configuration and the evaluations of a run; `curve` is returns by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps({"env": {"name": "ant"}, **settings}))
    rows = [{"step": step, "eval/episode_reward": value} for step, value in (curve or {}).items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def add_result(
    folder: Path, overrides: Sequence[str], best: float | None = None, stop_reason: str = "completed", **fields: Any
) -> None:
    """Writes the result of a sweep's job."""
    folder.mkdir(parents=True, exist_ok=True)
    result = {"stop_reason": stop_reason, "step": 1000, "return": best, "best_return": best, **fields}
    (folder / "result.json").write_text(json.dumps(result | {"overrides": list(overrides)}))


def add_job(folder: Path, overrides: Sequence[str], best: float, stop_reason: str = "completed") -> None:
    """Writes a job that has ended: its return grows linearly to the best one."""
    add_run(folder, {500: best / 2, 1000: best})
    add_result(folder, overrides, best, stop_reason)
