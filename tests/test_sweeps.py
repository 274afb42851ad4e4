"""Sweeps by launchers and sweepers other than those of Hydra, in other processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, SMALLEST

from rlstable.cli.compose import compose
from rlstable.config.extras import install
from rlstable.io.run_folder import write_config
from rlstable.train import WORST_SCORE

TINY = [*SMALLEST, "devices=1", "total_steps=128", "eval.num_evals=1", "logging=quiet"]


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    found = importlib.util.find_spec(f"hydra_plugins.{module}") if importlib.util.find_spec("hydra_plugins") else None
    return pytest.mark.skipif(found is None, reason=f"{install(extra)} to run this")


def sweep(folder: Path, *words: str) -> tuple[int, str, list[dict[str, object]]]:
    """Runs a sweep; returns its exit code, its output and the results of its jobs."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "rlstable.train", "-m", *TINY, f"hydra.sweep.dir={folder}", *words]
    done = subprocess.run(command, cwd=folder.parent, env=env, capture_output=True, text=True, timeout=600)
    paths = sorted(folder.glob("*/result.json"), key=lambda path: int(path.parent.name))
    return done.returncode, done.stdout + done.stderr, [json.loads(path.read_text()) for path in paths]


def test_launcher_may_differ_when_a_run_is_resumed(tmp_path: Path) -> None:
    write_config(tmp_path, compose(["env=fast", "seed=3"]).model_dump(mode="json"))
    config = compose([f"resume={tmp_path}", "sweep=local", "total_steps=999"])
    assert (config.env.name, config.seed, config.total_steps) == ("fast", 3, 999)


LAUNCHERS = [
    pytest.param("joblib", marks=[needs("hydra_joblib_launcher", "joblib"), pytest.mark.slow]),
    pytest.param("submitit_local", marks=[needs("hydra_submitit_launcher", "submitit"), pytest.mark.slow]),
    pytest.param("ray", marks=[needs("hydra_ray_launcher", "ray"), pytest.mark.slow]),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_failing_job_does_not_stop_the_others(launcher: str, tmp_path: Path) -> None:
    code, printed, results = sweep(tmp_path / "sweep", f"sweep={launcher}", "seed=-1,1")
    assert [result["stop_reason"] for result in results] == ["config_error", "completed"], printed
    assert code == 2
    assert (tmp_path / "sweep" / "1" / "checkpoints").is_dir()
    assert "seed: input should be greater than or equal to 0, got -1" in printed or launcher != "joblib"
    assert "rlstable.report sweep=" in printed


@pytest.mark.slow
@needs("hydra_optuna_sweeper", "optuna")
def test_optuna_maximizes_the_return_and_counts_failed_runs(tmp_path: Path) -> None:
    """Half of the settings that can be drawn end at once, by name."""
    words = ["sweep=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=1"]
    space = ["fault.site=reward", "fault.probability=1.0", "guards.storm.patience=1", "supervise=off"]
    code, printed, results = sweep(tmp_path / "sweep", *words, *space, "fault.start=choice(0,1000)", "seed=range(0,4)")
    assert len(results) == 6, printed
    endings = {str(result["stop_reason"]) for result in results}
    assert endings == {"physics_unstable", "completed"}
    assert code == 5
    found = (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    best = max(float(str(result["best_return"])) for result in results if result["best_return"] is not None)
    assert f"best_value: {best}" in found and str(WORST_SCORE) not in found


@pytest.mark.slow
@needs("hydra_optuna_sweeper", "optuna")
def test_search_for_the_least_return_is_rejected(tmp_path: Path) -> None:
    code, printed, _ = sweep(tmp_path / "sweep", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=1", "seed=range(0,4)")
    assert code == 2 and "minimize would search for the lowest return; set it to maximize" in printed
