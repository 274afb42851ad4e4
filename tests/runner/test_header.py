"""The header of a run: task, device, sizes, networks and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import tiny_config

from rlstable.runner.loop import TrainingLoop
from rlstable.runner.summary import header

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


def rows(folder: Path, **sections: Any) -> dict[str, str]:
    config = tiny_config(**sections)
    loop = TrainingLoop(config, folder)
    try:
        return dict(header(config, loop.single, folder))
    finally:
        loop.close()


def test_header_multiplies_the_sizes_and_counts_parameters(tmp_path: Path) -> None:
    config = tiny_config()
    shown = rows(tmp_path / "run")
    ppo, per_iteration = config.ppo, config.env_steps_per_iteration
    iterations = -(-config.total_steps // per_iteration)
    assert shown["task"] == f"{config.env.name}, physics toy"
    assert shown["steps"].startswith(f"{ppo.num_envs} environments x ")
    assert shown["steps"].endswith(
        f"{ppo.unroll_length} steps = {per_iteration} per iteration, {iterations} iterations"
    )
    assert "cores" in shown["device"] and shown["device"].endswith("of memory")
    assert shown["networks"].startswith("policy ") and shown["networks"].endswith(" parameters")
    assert shown["run folder"] == str(tmp_path / "run")
