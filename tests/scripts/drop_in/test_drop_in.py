"""The drop-in beside Brax's PPO: what is trained, and the page."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlstable.config import ConfigError
from scripts import results
from scripts.drop_in import __main__ as drop_in

DEVICE = {"kind": "a processor", "cpus": 2}


def row(task: str, side: str, seed: int, *returns: float) -> dict[str, Any]:
    steps = [1000 * number for number in range(len(returns))]
    more = {"divisor": 16, "commit": "abc", "versions": {"jax": "1"}, "device": DEVICE, "seconds": steps}
    return {"task": task, "side": side, "seed": seed, "steps": steps, "return": list(returns), **more}


def test_only_missing_seeds_are_trained_and_rows_are_kept_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "drop_in.jsonl", []
    results.add(out, [row("CartpoleBalance", "brax", 0, 1.0, 2.0)])

    def run_seed(task: str, side: str, seed: int) -> dict[str, Any]:
        trained.append((task, side, seed))
        return row(task, side, seed, 3.0, 4.0)

    monkeypatch.setattr(drop_in, "run_seed", run_seed)
    drop_in.run(["CartpoleBalance"], 2, 1, out)
    assert trained == [
        ("CartpoleBalance", "rlstable", 0),
        ("CartpoleBalance", "brax", 1),
        ("CartpoleBalance", "rlstable", 1),
    ]
    assert len(results.read(out)) == 4


def test_row_has_the_evaluations_that_the_process_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "compiling\n" + "".join(
        json.dumps({"steps": steps, "return": steps / 2, "seconds": 1.0}) + "\n" for steps in (0, 100)
    )

    def run(command: list[str], **_: Any) -> Any:
        assert command[-5:] == ["brax", "CartpoleBalance", "3", "16", "30"]
        return subprocess.CompletedProcess(command, 0, printed, "")

    monkeypatch.setattr(drop_in.subprocess, "run", run)
    monkeypatch.setattr(drop_in.importlib.metadata, "version", lambda name: "0")
    for name in ("versions", "device", "commit"):
        monkeypatch.setattr(results, name, lambda: {})
    made = drop_in.run_seed("CartpoleBalance", "brax", 3)
    assert (made["steps"], made["return"]) == ([0, 100], [0.0, 50.0])

    def fail(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nValueError: no\n")

    monkeypatch.setattr(drop_in.subprocess, "run", fail)
    with pytest.raises(ConfigError, match=r"^brax CartpoleBalance 3 16 30: ValueError: no$"):
        drop_in.run_seed("CartpoleBalance", "brax", 3)


def test_page_has_both_sides_of_a_task_at_equal_steps(tmp_path: Path) -> None:
    out = tmp_path / "drop_in.jsonl"
    rows = [row("CartpoleBalance", "brax", seed, 1.0, 900.0 + seed) for seed in range(3)]
    rows += [row("CartpoleBalance", "rlstable", seed, 2.0, 950.0) for seed in range(3)]
    results.add(out, [*rows, row("PendulumSwingup", "brax", 0, 1.0, 2.0)])
    drop_in.main(["--page", "--out", str(out)])
    page = (tmp_path / "drop_in.md").read_text()
    assert "| CartpoleBalance | 1,000 | 901 [900, 902] | 950 [950, 950] |" in page
    assert "PendulumSwingup |" not in page and "divided by 16" in page and "a processor, 2 CPUs" in page
