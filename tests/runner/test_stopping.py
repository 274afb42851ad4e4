"""Signals: the line that answers, what a second one loses, and a long evaluation or iteration."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_compile import environment as quick_environment

from rlstable.io.console import Console
from rlstable.io.run_folder import steps_in
from rlstable.policy.policy import load_policy
from rlstable.runner.stopping import StopRequest
from rlstable.supervise.signals import Signals

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ROOT = Path(__file__).resolve().parents[2]


def test_signal_is_answered_with_what_a_second_one_loses() -> None:
    output, signals = io.StringIO(), Signals(owns_process=True)
    console = Console("lines", 1, stream=output)
    request = StopRequest(console, lambda reason: reason, lambda: "the last checkpoint is of step 640", signals)
    with request.catching_signals():
        signals.announce(signal.SIGINT)
    second = "a second signal stops it at once, without saving (the last checkpoint is of step 640)"
    assert output.getvalue() == f"Ctrl-C: the run saves and stops; {second}\n"


@pytest.mark.slow
def test_second_signal_ends_a_long_iteration_at_once_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """One iteration of XLA takes many minutes, and no Python handler runs meanwhile."""
    words = [
        "env=import", "env.name=toys:PointMass", "env.episode_length=12", "devices=1", "total_steps=1_000_000",
        "eval.num_evals=0", "ppo.num_envs=8", "ppo.batch_size=64", "ppo.num_minibatches=16", "ppo.unroll_length=16",
        "network.policy_hidden_layer_sizes=[256, 256]", "network.value_hidden_layer_sizes=[256, 256]",
        "logging.console=lines",
        "checkpoint.every=1", "hydra.run.dir=run",
    ]  # fmt: skip
    variables = os.environ | quick_environment() | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}

    def started(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlstable.train", *words, *more]
        return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True)

    assert started("total_steps=64", "ppo.num_updates_per_batch=2").wait(timeout=300) == 0
    # Without the KL limiter, which would end the epochs early.
    process = started("resume=auto", "ppo.num_updates_per_batch=10_000", "guards.limiters.kl=null")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("compiled training"):
            break
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    answer = process.stdout.readline()
    assert answer.startswith("Ctrl-C: the run saves and stops; ")
    assert answer.endswith("without saving (the last checkpoint is of step 16,384)\n")
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT
    assert steps_in(tmp_path / "run" / "checkpoints") == [1]
    assert load_policy(tmp_path / "run").host["step"] == 16_384
