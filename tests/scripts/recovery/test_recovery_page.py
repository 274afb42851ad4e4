"""Recovery from a learning rate far too high: rows and page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import results
from scripts.recovery import __main__ as recovery


def row(case: str, seed: int, value: float | None, **more: Any) -> dict[str, Any]:
    own = {
        "case": case, "seed": seed, "ending": "completed", "return": value, "best": value, "remedies": [],
        "back_at": [], "causes": [], "steps": 20, "lost_steps": 0, "rate": 3e-4, "curve": [[10, 1.0]], "seconds": 1.0,
    }  # fmt: skip
    return own | more


def test_recovery_seed_that_is_known_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "run_seed", lambda case, seed, overrides: row(case, seed, float(len(overrides))))
    out = tmp_path / "recovery.jsonl"
    out.write_text(json.dumps(row("some", 1, 5.0)) + "\n" + json.dumps(row("other", 0, 5.0)) + "\n")
    recovery.run_case("some", 3, out, ["a", "b", "c"])
    assert [(own["seed"], own["return"]) for own in results.read(out) if own["case"] == "some"] == [
        (1, 5.0),
        (0, 3.0),
        (2, 3.0),
    ]


def test_recovery_page_has_a_row_per_case_and_the_seeds_that_were_rolled_back(tmp_path: Path) -> None:
    back = {"remedies": ["fresh_resets", "scale_learning_rate 0.3"], "back_at": [4, 8], "causes": ["policy_diverged"]}
    rows = [
        row("clean", 0, 1000.0),
        row("clean", 1, 800.0),
        row("unsupervised", 0, None, ending="policy_diverged", best=None, curve=[], rate=0.3),
        row("supervised", 0, 900.0, lost_steps=8, **back),
    ]
    recovery.write(rows, tmp_path / "recovery.jsonl")
    page = (tmp_path / "recovery.md").read_text()
    assert "| `completed` 2 | 900 [800, 1,000] | 1.00 [0.89, 1.11] | 900 [800, 1,000] | 0 [0, 0] |" in page
    assert "| `policy_diverged` 1 | 0 [0, 0] | 0.00 [0.00, 0.00] | none in 1 of 1 | 0 [0, 0] | 0.3 [0.3, 0.3] |" in page
    assert "- fresh_resets, scale_learning_rate 0.3: 1 seeds" in page
    assert (tmp_path / "recovery.png").stat().st_size > 1000
