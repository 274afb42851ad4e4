"""Commands in this process, and the words of the smallest run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
# Iterations of 64 steps in short episodes; `total_steps` is left to the test.
SIZES = [
    "env.episode_length=12", "eval.num_envs=2", "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2",
    "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
]  # fmt: skip
SMALLEST = ["env=import", "ppo=default", "env.name=toys:PointMass", *SIZES]


def exit_code(main: Callable[[Sequence[str] | None], None], *words: str) -> int:
    """Exit code of a command with the given arguments."""
    return typed(lambda: main(list(words)))


def typed(main: Callable[[], None], *words: str) -> int:
    """Exit code of a command that reads `sys.argv`, which is restored."""
    with mock.patch.object(sys, "argv", ["rlstable", *words]):
        try:
            main()
        except SystemExit as caught:
            return int(caught.code or 0)
    return 0


def printed_by(code: str) -> list[str]:
    """The lines that another process of Python prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
