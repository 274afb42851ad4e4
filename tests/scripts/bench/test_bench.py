"""The benchmark: its legs, results read from each side, time limits, sittings, pages and mistakes."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.config import Config
from scripts import process, results
from scripts.bench import __main__ as bench
from scripts.bench import leg as legs
from scripts.bench import page, tasks
from scripts.bench.leg import Leg
from scripts.process import Outcome

CPU = {"platform": "cpu", "kind": "Slow CPU", "cpus": 2}
LEG = Leg("threshold", "pendulum", "ours", "", False, ("env=inverted_pendulum",), 60.0, 950.0)
RIVAL = dataclasses.replace(LEG, side="sb3", settings={"env": "InvertedPendulum-v5"})
DONE = Outcome(started=100.0, seconds=20.0, cpu=30.0, code=0, peak_mb=500.0)
# Options that Brax's PPO lacks.
OURS = (
    "gae", "normalizer_update", "normalize_values", "learning_rate_warmup",
    "gradient_accumulation", "optimizer",
)  # fmt: skip


def points(*values: float | None) -> list[dict[str, Any]]:
    """One iteration every two seconds, from second ten on."""
    times = range(110, 110 + 2 * len(values), 2)
    return [{"time": t, "step": 5 * t - 540, "value": v, "evaluating": 0.5} for t, v in zip(times, values, strict=True)]


@functools.cache
def composed(settings: tuple[str, ...]) -> Config:
    return compose(list(settings))


@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_leg_has_settings_that_its_side_accepts(on_cpu: bool) -> None:
    every = [leg for group in tasks.legs(on_cpu) for leg in group]
    assert len({(leg.measure, leg.task, leg.side, leg.case, leg.warm) for leg in every}) == len(every)
    for leg in every:
        if isinstance(leg.settings, dict):
            assert leg.settings["episodes"] >= 10
            continue
        config = composed(leg.settings)
        if leg.side == "brax":
            told = legs.brax_settings(config, 1, leg.threshold)
            assert json.loads(json.dumps(told)) == told
            assert told["train"]["batch_size"] * told["train"]["num_minibatches"] % told["train"]["num_envs"] == 0
            assert leg.measure == "start" or told["train"]["num_eval_envs"] >= 10
            plain = type(config.ppo)()
            assert all(getattr(config.ppo, name) == getattr(plain, name) for name in OURS)
            assert config.network.activation == type(config.network)().activation


def test_brax_trains_as_many_steps_as_rlstable_and_reports_every_iteration() -> None:
    start = list(tasks.start_legs("humanoid", on_cpu=True))
    cases = (("ours", "mjx"), ("brax", "mjx"), ("ours", "native"))
    expected = {(*own, warm) for own in cases for warm in (False, True)}
    assert {(leg.side, leg.case, leg.warm) for leg in start} == expected
    config = compose(list(start[0].settings))
    told = legs.brax_settings(config, 0, None)["train"]
    assert config.total_steps == 24 * config.env_steps_per_iteration == told["num_timesteps"]
    assert (told["num_evals"], told["run_evals"], told["learning_rate_schedule"]) == (25, False, None)


def test_rows_of_a_run_are_read_up_to_a_torn_row(tmp_path: Path) -> None:
    evaluated = {"step": 20, "time": 2.0, "eval/episode_reward": 7.0, "eval/epoch_eval_time": 0.5}
    (tmp_path / "run").mkdir()
    text = '{"step": 10, "time": 1.0}\n' + json.dumps(evaluated) + '\n{"step": 30, "ti'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    first, second = legs.read_points(LEG, tmp_path)
    assert (first["step"], first["time"], first["value"]) == (10, 1.0, None)
    assert (second["value"], second["evaluating"]) == (7.0, 0.5)
    assert legs.read_points(RIVAL, tmp_path) == []


def test_threshold_is_reached_by_the_first_evaluation_at_it() -> None:
    found = legs.threshold_result(points(None, 100.0, 950.0, 1000.0), 950.0, DONE)
    assert (found["seconds"], found["steps"], found["evaluating"]) == (14.0, 30, 1.0)
    assert found["curve"] == [(12.0, 20, 100.0), (14.0, 30, 950.0)]
    found = legs.threshold_result(points(1.0, math.nan, 2.0), 950.0, DONE)
    assert (found["seconds"], found["steps"], len(found["curve"])) == (None, 30, 3)


def test_start_counts_from_the_process_and_its_speed_from_the_third_iteration() -> None:
    own = points(None, None, None, None, None)
    own[0]["time"] = 103.0
    own[3]["time"] += 0.5  # one outlier
    found = legs.start_result(own, DONE)
    assert (found["first"], found["iterations"], found["steady_sps"]) == (3.0, 5, pytest.approx(5.0))
    assert legs.start_result(own[:2], DONE)["steady_sps"] is None and legs.start_result([], DONE)["first"] is None


ENDINGS = {
    "reached": (LEG, points(950.0), 0, "reached"),
    "reached, killed while it was saving": (LEG, points(950.0), None, "reached"),
    "time": (LEG, points(1.0), None, "time limit"),
    "no line before the limit": (RIVAL, [], None, "time limit"),
    "steps": (LEG, points(1.0), 0, "all steps"),
    "by name": (LEG, points(1.0), 4, "storm"),
}


@pytest.mark.parametrize(("leg", "own", "code", "ending"), ENDINGS.values(), ids=ENDINGS)
def test_every_way_to_end_a_leg_has_a_name(leg: Leg, own: Any, code: int | None, ending: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"stop_reason": "storm"}')
    assert legs.ending_of(leg, own, dataclasses.replace(DONE, code=code), tmp_path) == ending


def test_process_that_runs_out_of_time_is_killed_with_its_children() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    outcome = process.watch([sys.executable, "-c", code], process.environment(), 1.0)
    assert outcome.code is None and 1.0 <= outcome.seconds < 60
    state, until = Path(f"/proc/{outcome.last_line}/stat"), time.monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":  # until the kernel has removed the process
        assert time.monotonic() < until, "the child lives on"
        time.sleep(0.05)


def test_versions_of_a_rival_are_those_of_its_own_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements-brax.txt").write_text("jax==0.0.1\n")
    monkeypatch.setattr(process, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(process, "python_of", lambda side: sys.executable)
    found = {name: results.versions()[name] for name in ("python", "jax")}
    assert process.versions("brax") == found


def test_no_side_inherits_a_cache_or_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_COMPILATION_CACHE_DIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "somewhere")
    env = process.environment(XDG_CACHE_HOME="here")
    assert {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(env)
    assert env["XDG_CACHE_HOME"] == "here"
    assert legs.caching(RIVAL, "there") == {}
    assert legs.caching(dataclasses.replace(RIVAL, warm=True), "there")["JAX_COMPILATION_CACHE_DIR"] == "there"


FAKE = """
import json, sys, time
settings = json.loads(sys.argv[1])
with open(sys.argv[2], "w", buffering=1) as lines:
    for n, value in enumerate(settings["values"]):
        row = {"time": time.time(), "step": 10 * n, "value": value, "evaluating": 0.0}
        print(json.dumps(row), file=lines)
        if value >= settings["threshold"]:
            break
    else:
        time.sleep(settings["sleep"])
"""


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command, SB3's side being a short script in this interpreter, and returns all results so far."""
    (tmp_path / "sb3_ppo.py").write_text(FAKE)
    monkeypatch.setattr(legs, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(legs, "python_of", lambda side: sys.executable)
    monkeypatch.setattr(process, "versions", lambda side: {"torch": "2.9"})
    monkeypatch.setattr(results, "device", lambda: CPU)

    def command(*values: float, sleep: float = 0.0, limit: float = 60.0, more: str = "--rounds 1") -> list[Any]:
        own = Leg("threshold", tasks.FIRST, "sb3", "", False, {"values": values, "sleep": sleep}, limit, 950.0)
        monkeypatch.setattr(tasks, "legs", lambda on_cpu: [[own]])
        out = tmp_path / "bench.jsonl"
        bench.main(["--out", str(out), "--readme", str(tmp_path / "README.md"), *more.split()])
        return results.read(out)

    return command


def test_measured_round_is_not_measured_again_in_its_sitting(measure: Any, tmp_path: Path) -> None:
    rows = measure(1.0, 960.0, more="--rounds 2")
    assert [(row["round"], row["ending"], row["steps"]) for row in rows] == [(1, "reached", 10), (2, "reached", 10)]
    assert rows[0]["versions"] == {"torch": "2.9"} and rows[0]["device"] == CPU
    again = measure(1.0, 960.0, more="--rounds 3")
    assert again[:2] == rows and [row["round"] for row in again] == [1, 2, 3]
    assert len(measure(960.0)) == 4, "other settings are another measurement"
    text = (tmp_path / "benchmarks.md").read_text()
    assert "<!-- threshold on cpu -->" in text and "| inverted_pendulum, 950 | SB3 PPO |" in text
    assert str(tmp_path) not in text
    rows = measure(960.0, more="--rounds 1 --new")
    assert len(rows) == 5 and rows[-1]["sitting"] >= rows[0]["sitting"]


def test_leg_that_reaches_its_limit_is_recorded_and_not_run_again(measure: Any, tmp_path: Path) -> None:
    (row,) = rows = measure(1.0, sleep=60.0, limit=0.5)
    assert (row["ending"], row["seconds"], row["limit"]) == ("time limit", None, 0.5)
    assert f"> {page.digits(row['ran'])}" in (tmp_path / "benchmarks.md").read_text()
    assert measure(1.0, sleep=60.0, limit=0.5) == rows


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--rounds 1", "bench: threshold inverted_pendulum: sb3 ended with exit code 1: ValueError: so"),
        ("--gpu", "bench: jax finds no GPU here"),
        ("--side brax", "bench: no measurement has that measure, task and side"),
        ("--out notes.txt", "bench: cannot read notes.txt"),
    ],
)
def test_mistake_or_failing_side_is_one_line(measure: Any, more: str, message: str, here: Path) -> None:
    (here / "sb3_ppo.py").write_text("raise ValueError('so')")
    (here / "notes.txt").write_text("not JSON\n")
    with pytest.raises(SystemExit, match=message):
        measure(960.0, more=more)
    assert not (here / "bench.jsonl").exists()
