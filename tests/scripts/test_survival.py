"""The survival matrix: its cases, its rows, its page, and one small training through it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import survival
import survival_page

from rlstable.compose import compose
from rlstable.fault_config import FaultConfig

TINY = (
    "env=import", "env.name=toys:PointMass", "env.episode_length=20", "network=small", "ppo.num_envs=8",
    "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "ppo.discounting=0.95", "ppo.learning_rate=3e-3", "total_steps=1280", "devices=1",
)  # fmt: skip


def row(case: str, side: str, value: float | None, **more: Any) -> dict[str, Any]:
    own = {"task": "toy", "side": side, "case": case, "seed": 0, "finished": True, "finite": True, "trips": {}}
    return {**own, "return": value, "seconds": 1.0, **more}


def test_every_site_has_a_case() -> None:
    """And every case a fault that the configuration knows."""
    assert {FaultConfig(**case.fault).site for case in survival.CASES.values()} == set(FaultConfig.sites())


@pytest.mark.slow  # the same is shown by the demonstration of NaN
def test_the_guarded_training_lives_where_the_unguarded_dies() -> None:
    """The same cases on both sides, several seeds in one program; the fault-free one is the measure."""
    early = {"start": 2, "probability": 0.05}
    cases = {
        "clean": survival.HEALTHY,
        "physics": {"site": "physics", **early},
        "reset": {"site": "reset", "probability": 0.3},
        "gradient": {"site": "gradient", "probability": 0.3, "start": 2},
    }
    finite, trips = {}, {}
    for side in ("off", "default"):
        arena = survival.Arena(compose([*TINY, f"guards={side}"]), range(2), None)
        for name, fault in cases.items():
            rows = arena.run(fault)
            assert [own["seed"] for own in rows] == [0, 1]
            finite[side, name] = all(own["finite"] for own in rows)
            trips[side, name] = {guard for own in rows for guard in own["trips"]}
    assert {name: finite["default", name] for name in cases} == dict.fromkeys(cases, True)
    assert (finite["off", "clean"], finite["off", "physics"], finite["off", "gradient"]) == (True, False, False)
    assert trips["default", "physics"] == {"quarantine"} and trips["default", "gradient"] == {"update"}
    assert not trips["default", "clean"] and not any(trips["off", name] for name in cases)


def test_a_cell_says_what_became_of_a_case() -> None:
    assert survival_page.cell([], 1000.0, possible=False) == ("n/a", None)
    assert survival_page.cell([], 1000.0) == ("not run", None)
    lives = [row("x", "off", 900.0), row("x", "off", 1000.0), row("x", "off", 500.0)]
    assert survival_page.cell(lives, 1000.0) == ("0.90 [0.50, 1.00]", 0.9)
    assert survival_page.cell([row("x", "off", None, finite=False)], 1000.0) == ("**nan** 0.00 [0.00, 0.00]", 0.0)
    text, _ = survival_page.cell([row("x", "off", 1000.0, finished=False)], 1000.0)
    assert text == "**stopped** 1.00 [1.00, 1.00]"


def test_the_page_shows_every_case_and_side(tmp_path: Path) -> None:
    """With its picture beside it."""
    rows = [
        row(case, side, 1000.0 if side == "default" else 10.0)
        for case in ("clean", "bad")
        for side in ("off", "default")
    ]
    rows[-1]["trips"] = {"quarantine": 3}
    out = tmp_path / "survival.jsonl"
    out.write_text("".join(json.dumps(own) + "\n" for own in rows))
    cases = ["clean", "bad", "never run", "never possible"]
    survival_page.write(survival_page.read(out), cases, out, lambda *asked: asked[2] != "never possible")
    page = (tmp_path / "survival.md").read_text()
    assert "| bad | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | quarantine 3 |" in page
    assert "| never run | not run | not run |  |" in page
    assert "| never possible | n/a | n/a |  |" in page
    assert (tmp_path / "survival.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_known_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "survival.jsonl"
    known = row("clean", "default", 1.0) | {"task": "generalized"}
    out.write_text(json.dumps(known) + "\n")
    monkeypatch.setattr(survival, "Arena", lambda *_: pytest.fail("nothing was missing"))
    survival.run_side("generalized", "default", [survival.CASES["clean"]], range(1), out)
    assert survival_page.read(out) == [known]


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--seeds", "0"], ["--only", "no such case"], ["--task", "moon"]):
        with pytest.raises(SystemExit) as stop:
            survival.main(arguments)
        assert stop.value.code == 2
        assert arguments[0] in capsys.readouterr().err
