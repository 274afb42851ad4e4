"""A job that submitit preempts saves, is put back into the queue and resumes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from toys import tiny_config

submitit: Any = pytest.importorskip("submitit", reason="submitit is no dependency; install it to run this")
TESTS = Path(__file__).resolve().parents[1]
ITERATION = 64


class Training:
    """The submitted job. Submitit calls `checkpoint` for the job to submit again, as with Hydra's launcher."""

    def __call__(self, run_dir: str, iterations: int) -> tuple[str, int]:
        from rlstable.runner.loop import TrainingLoop

        config = tiny_config(
            guards={}, devices=1, total_steps=iterations * ITERATION, eval={"num_evals": 0}, resume="auto",
            logging={"console": "off"},
        )  # fmt: skip
        result = TrainingLoop(config, run_dir, lambda *_: time.sleep(0.02)).run()
        return result.stop_reason.name, result.step

    def checkpoint(self, *args: Any) -> Any:
        return submitit.helpers.DelayedSubmission(self, *args)


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def task_of(controller: int) -> int:
    """The training process; submitit's local controller acts as the cluster."""
    (task,) = psutil.Process(controller).children()
    return task.pid


@pytest.mark.slow
def test_preempted_job_is_requeued_and_completes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(TESTS.parent), str(TESTS), str(TESTS / "supervise"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    run_dir, iterations = tmp_path / "run", 300
    executor = submitit.LocalExecutor(tmp_path / "jobs", max_num_timeout=3)
    executor.update_parameters(timeout_min=10)
    job = executor.submit(Training(), str(run_dir), iterations)
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 600
    for rows in (20, 60):
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= rows):
            assert job.state == "RUNNING" and time.monotonic() < deadline, job.stderr()
            time.sleep(0.05)
        # Slurm sends SIGTERM to all processes, which submitit ignores, and then the signal for preemption.
        task = task_of(int(job.job_id))
        os.kill(task, signal.SIGTERM)
        os.kill(task, signal.SIGUSR2)
        psutil.wait_procs([psutil.Process(task)] if psutil.pid_exists(task) else [], timeout=60)
    assert job.result() == ("completed", iterations * ITERATION)
    told = [(event["kind"], event.get("stop_reason")) for event in events(run_dir)]
    assert told == [
        ("stopped", "preempted"), ("resumed", None), ("stopped", "preempted"), ("resumed", None),
        ("stopped", "completed"),
    ]  # fmt: skip
    resumed = [event["iteration"] for event in events(run_dir) if event["kind"] == "resumed"]
    assert 20 <= resumed[0] < 60 <= resumed[1] < iterations
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [ITERATION * n for n in range(1, iterations + 1)]
    assert "Requeued job" in job.stderr() and "Bypassing signal SIGTERM" in job.stderr()
