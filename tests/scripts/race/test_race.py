"""The race: its legs, results read from each side, time limits, kept results, the page and mistakes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import process, results
from scripts.bench import __main__ as bench
from scripts.process import Outcome
from scripts.race import floor as race_floor
from scripts.race import legs as race_legs
from scripts.race import page as race_page
from scripts.race import race, tasks
from scripts.race.legs import Leg

CPU = {"platform": "cpu", "kind": "cpu", "cpus": 2}
LEG = Leg("threshold", "pendulum", "ours", "", False, ("env=inverted_pendulum",), 60.0, 950.0)
RIVAL = dataclasses.replace(LEG, side="sb3", settings={"env": "InvertedPendulum-v5"})
DONE = Outcome(started=100.0, seconds=20.0, cpu=30.0, code=0, peak_mb=500.0, last_line="")


def points(*values: float | None, step: int = 10) -> list[dict[str, Any]]:
    """One iteration every two seconds, from second ten on."""
    return [
        {"time": 110.0 + 2 * n, "step": (n + 1) * step, "value": value, "evaluating": 0.5}
        for n, value in enumerate(values)
    ]


def test_every_leg_has_settings_that_its_side_accepts() -> None:
    every = tasks.legs(on_cpu=True)
    assert len({(leg.measure, leg.task, leg.side, leg.case, leg.warm) for leg in every}) == len(every)
    for leg in every:
        if leg.side in ("ours", "floor"):
            compose(list(leg.settings))
        elif leg.side == "brax":
            told = race_legs.brax_settings(compose(list(leg.settings)), 1, leg.threshold)
            assert json.loads(json.dumps(told)) == told
            assert told["train"]["batch_size"] * told["train"]["num_minibatches"] % told["train"]["num_envs"] == 0
            assert told["train"]["num_eval_envs"] >= 10
        else:
            assert leg.settings["episodes"] >= 10


def test_brax_trains_as_many_steps_as_rlstable_and_reports_every_iteration() -> None:
    start = [leg for leg in tasks.legs(on_cpu=True) if leg.measure == "start" and leg.task == "humanoid"]
    assert {(leg.side, leg.case, leg.warm) for leg in start} == {
        (side, case, warm)
        for side, case in (("ours", "mjx"), ("brax", "mjx"), ("ours", "native"))
        for warm in (False, True)
    }
    assert not [leg for leg in tasks.legs(on_cpu=False) if leg.measure == "start" and leg.case == "native"]
    config = compose(list(start[0].settings))
    told = race_legs.brax_settings(config, 0, None)["train"]
    assert config.total_steps == 24 * config.env_steps_per_iteration == told["num_timesteps"]
    assert (told["num_evals"], told["run_evals"]) == (25, False)
    assert told["learning_rate_schedule"] is None
    assert "gae" not in told


@pytest.mark.parametrize(
    "override",
    ["ppo.gae=per_iteration", "ppo.optimizer.eps=1e-5", "network.activation=tanh", "ppo.normalize_values=true"],
)
def test_setting_that_brax_lacks_is_an_error(override: str) -> None:
    name = override.split(".")[1].split("=")[0]
    with pytest.raises(ConfigError, match=f"Brax's PPO has no {name}"):
        race_legs.brax_settings(compose(["env=ant", "ppo=ant", override]), 0, None)


PUBLISHED = {
    "inverted_pendulum": (163_840, 2_000_000, 20, {"num_envs": 2048, "batch_size": 1024, "num_updates_per_batch": 4}),
    "ant": (327_680, 50_000_000, 201, {"num_envs": 4096, "batch_size": 2048, "num_updates_per_batch": 4}),
    "halfcheetah": (327_680, 50_000_000, 201, {"num_envs": 2048, "batch_size": 512, "num_updates_per_batch": 8}),
}


@pytest.mark.parametrize("task", PUBLISHED)
def test_published_brax_recipe_keeps_its_batches_and_evaluates_every_iteration(task: str) -> None:
    leg = next(leg for leg in tasks.threshold_legs(task, on_cpu=True) if (leg.side, leg.case) == ("brax", "published"))
    config = compose(list(leg.settings))
    told = race_legs.brax_settings(config, 1, leg.threshold)["train"]
    iteration, steps, evaluations, batches = PUBLISHED[task]
    assert (config.env_steps_per_iteration, told["num_timesteps"], told["num_evals"]) == (iteration, steps, evaluations)
    assert told["num_timesteps"] <= (told["num_evals"] - 1) * iteration
    assert {name: told[name] for name in batches} == batches
    assert (leg.measure, leg.warm, told["num_eval_envs"]) == ("threshold", False, 10)
    assert race_page._label(leg) == "Brax PPO, published"


@pytest.mark.parametrize("task", ["ant", "halfcheetah"])
def test_brax_also_races_on_the_mjx_backend(task: str) -> None:
    legs = {leg.case: leg for leg in tasks.threshold_legs(task, on_cpu=True) if leg.side == "brax"}
    cut, other = ([word for word in legs[case].settings if "backend" not in word] for case in ("", "mjx"))
    assert cut == other
    assert [compose(list(legs[case].settings)).env.backend for case in ("", "mjx")] == ["spring", "mjx"]
    assert {leg.case for leg in tasks.legs(on_cpu=True) if leg.measure == "threshold"} == set(race_page.STROKES)


def test_rsl_rl_is_measured_only_on_a_gpu_and_cold() -> None:
    assert not [leg for leg in tasks.legs(on_cpu=True) if leg.side == "rsl_rl"]
    every = tasks.legs(on_cpu=False)
    own = [leg for leg in every if leg.side == "rsl_rl"]
    assert [(leg.measure, leg.task, leg.case, leg.warm) for leg in own] == [
        ("start", "ant", "mjx", False),
        ("start", "humanoid", "mjx", False),
    ]
    for leg in own:
        (beside,) = [
            other
            for other in every
            if (other.measure, other.task, other.side, other.warm) == ("start", leg.task, "brax", False)
        ]
        assert dataclasses.replace(leg, side="brax") == beside
    assert race_page._label(own[0]) == "RSL-RL PPO, mjx"
    assert set(race_page.LABELS) == set(race_page.COLOURS) == {*tasks.SIDES} - {"floor"}


def test_rsl_rl_gets_the_settings_of_the_task() -> None:
    (leg,) = [leg for leg in tasks.legs(on_cpu=False) if leg.side == "rsl_rl" and leg.task == "humanoid"]
    told = race_legs.rsl_rl_settings(compose(list(leg.settings)), 3)
    assert json.loads(json.dumps(told)) == told
    assert told == {
        "env": "humanoid",
        "backend": "mjx",
        "reward_scaling": 0.1,
        "wrapper": {"num_actors": 2048, "seed": 3, "episode_length": 1000, "action_repeat": 1},
        "runner": {
            "num_steps_per_env": 160,
            "save_interval": 50,
            "obs_groups": {"policy": ["state"], "critic": ["state"]},
            "policy": {
                "class_name": "ActorCritic",
                "init_noise_std": 1.0,
                "actor_hidden_dims": [32, 32, 32, 32],
                "critic_hidden_dims": [256, 256, 256, 256, 256],
                "activation": "swish",
                "actor_obs_normalization": True,
                "critic_obs_normalization": True,
            },
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": 8,
                "num_mini_batches": 32,
                "clip_param": 0.3,
                "gamma": 0.97,
                "lam": 0.95,
                "value_loss_coef": 0.25,
                "use_clipped_value_loss": False,
                "entropy_coef": 1e-3,
                "learning_rate": 3e-4,
                "schedule": "fixed",
                "max_grad_norm": math.inf,
                "normalize_advantage_per_mini_batch": True,
            },
        },
        "iterations": 24,
    }


@pytest.mark.parametrize(
    "override",
    [
        "ppo.gae=per_iteration",
        "ppo.learning_rate_schedule=adaptive_kl",
        "ppo.clipping_epsilon_value=0.2",
        "ppo.normalize_advantage=false",
        "network.distribution_type=normal",
        "eval.num_evals=5",
    ],
)
def test_setting_that_rsl_rl_lacks_is_an_error(override: str) -> None:
    name = override.split(".")[1].split("=")[0]
    with pytest.raises(ConfigError, match=f"RSL-RL's PPO has no {name} as"):
        race_legs.rsl_rl_settings(compose(["env=ant", "ppo=ant", "eval.num_evals=0", override]), 0)


def test_rsl_rl_has_its_own_gpu_interpreter_and_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, Path, bool]] = []

    def python_of(*args: Any) -> Path:
        asked.append(args)
        return Path("python")

    monkeypatch.setattr(race_legs, "python_of", python_of)
    workshop = race_legs.Workshop(Path("venvs"), True)
    ant = ("env=ant", "ppo=ant", "eval.num_evals=0")
    leg = Leg("start", "ant", "rsl_rl", "mjx", False, ant, 60.0)
    python, script, told, lines = workshop._command(leg, 7, tmp_path)
    assert (python, Path(script).name, lines) == ("python", "rsl_rl_ppo.py", str(tmp_path / "lines.jsonl"))
    assert Path(script).exists()
    assert json.loads(told)["wrapper"]["seed"] == 7
    workshop._command(dataclasses.replace(leg, side="brax"), 7, tmp_path)
    threshold = {"episodes": 10}
    workshop._command(dataclasses.replace(leg, side="sb3", settings=threshold), 7, tmp_path)
    venvs = Path("venvs")
    assert asked == [("rsl_rl", venvs, True), ("brax", venvs, True), ("sb3", venvs, False)]
    assert race_legs.caching(leg, "there") == {}


def test_rows_of_a_run_are_read_up_to_a_torn_row(tmp_path: Path) -> None:
    evaluated = {"eval/episode_reward": 7.0, "eval/epoch_eval_time": 0.5, "timing/learning_share": 0.8}
    rows = [{"step": 10, "time": 1.0, "training/sps": 5.0}, {"step": 20, "time": 2.0, **evaluated}]
    (tmp_path / "run").mkdir()
    text = "\n".join(map(json.dumps, rows)) + '\n{"step": 30, "ti'
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    first, second = race_legs.read_points(LEG, tmp_path)
    assert (first["step"], first["time"], first["value"]) == (10, 1.0, None)
    assert (second["value"], second["evaluating"], second["learning_share"]) == (7.0, 0.5, 0.8)
    assert race_legs.read_points(RIVAL, tmp_path) == []


def test_threshold_is_reached_by_the_first_evaluation_at_it() -> None:
    result = race_legs.threshold_result(points(None, 100.0, 950.0, 1000.0), 950.0, DONE)
    assert (result["seconds"], result["steps"], result["evaluations"], result["evaluating"]) == (14.0, 30, 2, 1.0)
    assert result["curve"] == [(12.0, 20, 100.0), (14.0, 30, 950.0)]


def test_threshold_that_is_not_reached_has_no_time() -> None:
    result = race_legs.threshold_result(points(1.0, math.nan, 2.0), 950.0, DONE)
    assert (result["seconds"], result["steps"], len(result["curve"])) == (None, 30, 3)
    assert race_legs.threshold_result([], 950.0, DONE)["curve"] == []


def test_start_counts_from_the_process_and_its_rate_from_the_third_iteration() -> None:
    own = points(None, None, None, None, None)
    own[0]["time"], own[-1]["learning_share"] = 103.0, 0.7
    own[3]["time"] += 0.5  # one outlier
    result = race_legs.start_result([{"time": 101.0, "imported_mb": 1}, *own], {"at": 1.234, "mb": 300.0}, DONE)
    assert (result["imports"], result["first"], result["iterations"]) == (1.23, 3.0, 5)
    assert result["steady_sps"] == pytest.approx(5.0)
    assert (result["above_imports_mb"], result["learning_share"]) == (200.0, 0.7)
    assert race_legs.start_result(own[:2], {"at": 1.0, "mb": 0.0}, DONE)["steady_sps"] is None


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
    outcome = dataclasses.replace(DONE, code=code)
    assert race_legs.ending_of(leg, own, outcome, tmp_path) == ending


@pytest.mark.parametrize(("leg", "code"), [(LEG, 1), (LEG, 2), (RIVAL, 4), (RIVAL, -9)])
def test_leg_that_ends_with_an_error_is_no_measurement(leg: Leg, code: int, tmp_path: Path) -> None:
    outcome = dataclasses.replace(DONE, code=code, last_line="ValueError: so")
    with pytest.raises(ConfigError, match=f"exit code {code}: ValueError: so"):
        race_legs.ending_of(leg, points(1.0), outcome, tmp_path)


def test_process_is_measured_to_its_end(tmp_path: Path) -> None:
    code = (
        "import time; x = bytearray(64 * 2**20); x[::4096] = b'1' * len(x[::4096]); time.sleep(0.3); print('done\\n')"
    )
    outcome = process.watch([sys.executable, "-c", code], process.environment(), tmp_path, 60.0)
    assert (outcome.code, outcome.last_line) == (0, "done")
    assert 0.3 <= outcome.seconds < 60
    assert 0.0 < outcome.cpu < 60
    assert outcome.peak_mb is None or outcome.peak_mb > 64


def test_process_that_runs_out_of_time_is_killed_with_its_children(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    outcome = process.watch([sys.executable, "-c", code], process.environment(), tmp_path, 1.0)
    assert outcome.code is None
    assert 1.0 <= outcome.seconds < 60
    state = Path(f"/proc/{outcome.last_line}/stat")
    for _ in range(600):  # until the kernel has removed the process
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child lives on")


def test_no_side_inherits_a_cache_or_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "somewhere")
    monkeypatch.setenv("PYTHONPATH", "somewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    env = process.environment(XDG_CACHE_HOME="here")
    assert {"JAX_COMPILATION_CACHE_DIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}.isdisjoint(env)
    assert env["XDG_CACHE_HOME"] == "here"
    brax = dataclasses.replace(LEG, side="brax")
    assert race_legs.caching(brax, "there") == {}
    assert race_legs.caching(dataclasses.replace(brax, warm=True), "there")["JAX_COMPILATION_CACHE_DIR"] == "there"


def test_warm_process_finds_compiled_programs_and_cold_process_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Leg, Path]] = []

    def run(self: Any, leg: Leg, seed: int, cache: str) -> dict[str, Any]:
        found = (Path(cache) / "program").exists()
        (Path(cache) / "program").touch()
        used.append((leg, Path(cache)))
        return {"found": found}

    monkeypatch.setattr(race_legs.Workshop, "_run", run)
    cold, brax = LEG, dataclasses.replace(LEG, side="brax")  # the same settings, compiled separately
    warm, brax_warm = (dataclasses.replace(leg, warm=True) for leg in (cold, brax))
    workshop = race_legs.Workshop(Path("venvs"), False)
    assert [workshop.run(leg, 1)["found"] for leg in (cold, cold, warm, warm)] == [False, False, True, True]
    assert [leg for leg, _ in used] == [cold, cold, warm, warm]
    # Brax's cold processes keep no programs, so a warm process needs one that fills the cache.
    assert [workshop.run(leg, 1)["found"] for leg in (brax, brax_warm, brax_warm)] == [False, True, True]
    assert [leg for leg, _ in used[4:]] == [brax, brax_warm, brax_warm, brax_warm]
    workshop.close()
    assert not any(cache.exists() for _, cache in used)


FAKE = """
import json, sys, time
settings = json.loads(sys.argv[1])
with open(sys.argv[2], "w", buffering=1) as lines:
    print(json.dumps({"time": time.time(), "imported_mb": 1.0, "platform": "cpu"}), file=lines)
    for n, value in enumerate(settings["values"]):
        row = {"time": time.time(), "step": 10 * n, "value": value, "evaluating": 0.0}
        print(json.dumps(row), file=lines)
        if value >= settings["threshold"]:
            break
    else:
        time.sleep(settings["sleep"])
"""


@pytest.fixture
def fake_rival(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SB3's side is a short script in this interpreter."""
    (tmp_path / "sb3_ppo.py").write_text(FAKE)
    monkeypatch.setattr(race_legs, "REQUIREMENTS", tmp_path)
    for module in (race_legs, race):
        monkeypatch.setattr(module, "python_of", lambda *args: sys.executable)


def goals(*values: float, sleep: float = 0.0, limit: float = 60.0) -> dict[str, tasks.Goal]:
    return {"toy": tasks.Goal(950.0, {("sb3", ""): {"values": values, "sleep": sleep}}, limit)}


@pytest.fixture
def race_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_rival: None) -> Any:
    """Runs the command for some goals; returns its exit code and all results so far."""
    monkeypatch.setattr(tasks, "START", {})
    monkeypatch.setattr(results, "device", lambda: CPU)

    def command(own: dict[str, tasks.Goal], *more: str) -> tuple[int, list[dict[str, Any]]]:
        monkeypatch.setattr(tasks, "THRESHOLD", own)
        monkeypatch.setattr(tasks, "TASKS", tuple(own))
        file, page = tmp_path / "race.jsonl", tmp_path / "page.md"
        paths = ["--results", str(file), "--out", str(page), "--readme", str(tmp_path / "README.md")]
        code = bench.main(["race", *paths, "--json", *more])
        return code, results.read(file)

    return command


def test_measured_round_is_kept_and_not_measured_again(race_with: Any, tmp_path: Path) -> None:
    code, rows = race_with(goals(1.0, 960.0), "--rounds", "2")
    assert code == 0
    assert [(row["round"], row["ending"], row["steps"]) for row in rows] == [(1, "reached", 10), (2, "reached", 10)]
    assert rows[0]["versions"]["torch"]
    assert rows[0]["device"] == CPU
    _, again = race_with(goals(1.0, 960.0), "--rounds", "3")
    assert again[:2] == rows
    assert [row["round"] for row in again] == [1, 2, 3]
    _, other = race_with(goals(960.0), "--rounds", "1")
    assert len(other) == 4, "other settings are another measurement"
    text = (tmp_path / "page.md").read_text()
    assert "| toy, 950 | SB3 PPO |" in text
    assert "| 1 of 1 |" in text, "the page shows the settings of now"
    assert "race-threshold on cpu" in text
    assert "![from enter to a return that is worth having](race_threshold_cpu.png)" in text
    assert (tmp_path / "race_threshold_cpu.png").stat().st_size > 1000
    assert str(tmp_path) not in text


def test_leg_that_ran_out_of_time_is_recorded_and_run_again_with_more_time(race_with: Any, tmp_path: Path) -> None:
    _, rows = race_with(goals(1.0, sleep=60.0, limit=0.5), "--rounds", "1")
    (row,) = rows
    assert (row["ending"], row["seconds"], row["limit"]) == ("time limit", None, 0.5)
    assert row["curve"] and row["ran"] >= 0.5
    assert f"> {race_page.digits(row['ran'])}" in (tmp_path / "page.md").read_text()
    assert race_with(goals(1.0, sleep=60.0, limit=0.5), "--rounds", "1")[1] == rows
    assert len(race_with(goals(1.0, sleep=60.0, limit=0.6), "--rounds", "1")[1]) == 2


def test_other_recipe_or_processor_is_another_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    ant = dataclasses.replace(LEG, settings=("env=ant", "recipe_for=cpu"))
    changed = dataclasses.replace(LEG, settings=("env=ant", "recipe_for=cpu", "ppo.gae_lambda=0.5"))
    assert race.recipe(ant) == race.recipe(ant) != race.recipe(changed)
    row = {**race.identity(ant, "One"), "round": 1, "ending": "reached"}
    assert race.measured([row], ant, "One", None) == {1: row}
    assert not race.measured([row], ant, "Other", None)
    assert not race.measured([row | {"recipe": "older"}], ant, "One", None)
    assert "recipe" not in race.identity(RIVAL, "One")
    monkeypatch.setattr(results.machine, "name", lambda: "One")
    assert results.described("cpu", "cpu")["kind"] == "One"
    assert results.described("gpu", "NVIDIA H100")["kind"] == "NVIDIA H100"


def test_race_with_page_runs_nothing_and_writes_the_page(race_with: Any, tmp_path: Path) -> None:
    race_with(goals(960.0), "--rounds", "1")
    (tmp_path / "page.md").unlink()
    (tmp_path / "sb3_ppo.py").unlink()
    code, rows = race_with(goals(960.0), "--page")
    assert (code, len(rows)) == (0, 1)
    assert "SB3 PPO" in (tmp_path / "page.md").read_text()


def test_failing_side_is_one_line(race_with: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sb3_ppo.py").write_text("raise ValueError('so')")
    with pytest.raises(SystemExit) as caught:
        race_with(goals(960.0), "--rounds", "1")
    assert caught.value.code == 2
    message = "bench: race: threshold toy: sb3 ended with exit code 1: ValueError: so"
    assert capsys.readouterr().err.splitlines()[-1] == message
    assert not (tmp_path / "race.jsonl").exists()


def test_sides_take_turns_and_another_side_starts_each_round() -> None:
    one, other, third = (dataclasses.replace(LEG, side=side) for side in ("ours", "brax", "sb3"))
    apart = dataclasses.replace(LEG, task="ant")
    order = [(number, leg.task, leg.side) for number, leg in race.in_turn([one, other, apart, third], 2)]
    assert [side for number, task, side in order if task == "pendulum"] == [
        "ours",
        "brax",
        "sb3",
        "brax",
        "sb3",
        "ours",
    ]
    assert [number for number, task, _ in order if task == "ant"] == [1, 2]


def test_rounds_are_shown_as_median_and_range() -> None:
    assert race_page.spread([3.0, 1.0, 2.0]) == "2.00\n[1.00, 3.00]"
    assert race_page.spread([10.0, 120.4]) == "65.2\n[10.0, 120]"
    assert race_page.spread([1234.5]) == "1,234"
    assert race_page.spread([None, None]) == race_page.spread([]) == "–"
    assert race_page.spread([21.0, math.inf, 20.0], 600.0) == "21.0\n[20.0, > 600]"
    assert race_page.spread([21.0, math.inf], 600.0) == "> 600\n[21.0, > 600]"
    assert race_page.spread([math.inf], 600.2) == "> 600"


def start_results() -> list[tuple[Leg, list[dict[str, Any]]]]:
    row = {
        "imports": 2.0, "first": 10.0, "steady_sps": 500.0, "learning_share": 0.5, "peak_mb": 900.0,
        "above_imports_mb": 600.0, "iterations": 24, "versions": {"jax": "1"},
    }  # fmt: skip
    floor = {"floor_sps": 1000.0, "physics_sps": 2000.0, "learner_sps": 2000.0, "gflops": 100.0, "versions": {}}
    leg = Leg("start", "ant", "ours", "mjx", False, ("env=ant",), 60.0)
    warm = dataclasses.replace(leg, warm=True)
    under = dataclasses.replace(leg, measure="floor", side="floor")
    missing = dataclasses.replace(leg, side="brax")
    return [(leg, [row]), (warm, [row | {"first": 4.0}]), (under, [floor]), (missing, [])]


def test_table_of_starts_has_cold_and_warm_in_one_row_and_the_share_of_the_floor(tmp_path: Path) -> None:
    start, speed, threshold = race_page.sections(start_results(), "NVIDIA H100", tmp_path)
    assert start.cells == [("ant", "rlstable, mjx", "2.00", "10.0", "4.00", "900", "600")]
    assert speed.cells == [("ant", "rlstable, mjx", "500\n[500, 500]", "0.50\n[0.50, 0.50]", "0.50\n[0.50, 0.50]")]
    assert "ant, mjx: floor 1,000 steps/s: physics 2,000, learner 2,000 at 100 GFLOP/s" in speed.notes
    assert (tmp_path / "race_start_nvidia_h100.png").exists()
    assert (start.name, speed.name, threshold.name) == race_page.NAMES
    assert threshold.cells == []


def test_operations_of_the_learner_are_those_of_its_matrix_products() -> None:
    # 3 -> 4 -> 2: forward 2 * (12 + 8), weights the same, and back through the second layer alone 2 * 8; twice.
    assert race_floor.operations((3, 4, 2), 2) == 2 * (40 + 40 + 16)
    sizes = ["network.policy_hidden_layer_sizes=[4]", "network.value_hidden_layer_sizes=[5]"]
    config = compose(["env=ant", "ppo=ant", "ppo.num_updates_per_batch=1", *sizes])
    # Policy 3 -> 4 -> 2 (mean and deviation of one action), value 3 -> 5 -> 1, and acting 2 * (12 + 8).
    assert race_floor.operations_per_step(config, 3, 1) == 96 + (6 * (15 + 5) - 2 * 15) + 40


BAD_INPUT = {
    "unknown task": (["--task", "antt"], "argument --task: invalid choice: 'antt'"),
    "unknown side": (["--side", "rllib"], "argument --side: invalid choice: 'rllib'"),
    "unknown measure": (["--measure", "speed"], "argument --measure: invalid choice: 'speed'"),
    "no round": (["--rounds", "0"], "argument --rounds: '0' must be a whole number, 1 or more"),
    "half a round": (["--rounds", "1.5"], "argument --rounds: '1.5' must be"),
    "nothing left": (["--task", "humanoid", "--side", "sbx"], "race: no leg has that task, side and measure"),
    "no folder": (["--results", "nowhere/race.jsonl"], "cannot write to nowhere/race.jsonl"),
    "no results": (["--results", "notes.txt"], "cannot read notes.txt"),
    "no page": (["--out", "nowhere/page.md"], "--out: there is no folder nowhere"),
}


@pytest.mark.parametrize(("args", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_race_command_reports_a_mistake_in_one_line_with_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "device", lambda: CPU)
    (tmp_path / "docs").mkdir()
    (tmp_path / "notes.txt").write_text("not JSON\n")
    with pytest.raises(SystemExit) as caught:
        bench.main(["race", *args])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"bench: {message}")


def test_virtual_environment_that_cannot_be_made_is_an_error_and_not_marked_as_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_install", lambda command, name: (_ for _ in ()).throw(ConfigError("no")))
    with pytest.raises(ConfigError):
        process.python_of("sb3", tmp_path, gpu=False)
    assert not (tmp_path / "sb3" / "installed").exists()


def test_virtual_environment_is_made_once_per_list_of_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def install(command: list[str], name: str) -> None:
        commands.append(command)
        (tmp_path / name).mkdir(exist_ok=True)

    monkeypatch.setattr(process, "_install", install)
    for gpu in (False, False, True):
        process.python_of("brax", tmp_path, gpu)
    assert len(commands) == 4, "made, known, made again for a GPU"
    assert any(word.startswith("jax==") for word in commands[1])
    assert any(word.startswith("jax[cuda12]==") for word in commands[3])


@pytest.mark.parametrize("name", tasks.RIVALS)
def test_every_rival_has_exact_versions(name: str) -> None:
    assert all(name and version for name, version in process.pins(name).items())


def test_commit_name_tells_whether_the_code_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results.commit() is None
    for name in ("rlstable", "docs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("1")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    clean = results.commit()
    assert clean is not None and re.fullmatch("[0-9a-f]{7}", clean)
    (tmp_path / "docs" / "file").write_text("what was measured")
    assert results.commit() == clean
    (tmp_path / "rlstable" / "file").write_text("2")
    assert results.commit() == f"{clean}+"
