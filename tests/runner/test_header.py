"""The header of a run: task, device, sizes, networks and folder."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from toys import tiny_config

from rlstable.io import services
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


def test_header_names_the_folder_and_the_command_of_tensorboard_and_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any) -> Any:
        return types.SimpleNamespace(id="x", step=0, url=address, log=lambda *_, **__: None, finish=lambda: None)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(services, "_start_wandb", start)
    address = None
    shown = rows(tmp_path / "a run", logging={"tensorboard": True, "wandb": {"mode": "offline"}})
    assert shown["tensorboard"] == "tensorboard --logdir 'a run/tensorboard'"
    assert shown["wandb"] == "offline; afterwards wandb sync 'a run'/wandb/offline-run-*"
    address = "https://wandb.ai/mine/rlstable/runs/x"
    shown = rows(tmp_path / "b", logging={"wandb": {"mode": "online"}})
    assert shown["wandb"] == f"{address}; its files are in b/wandb"
    assert "tensorboard" not in shown


def test_header_says_that_one_iteration_is_more_than_all_steps(tmp_path: Path) -> None:
    shown = rows(tmp_path / "run", total_steps=1)
    assert shown["steps"].endswith("1 iterations; one iteration is more than total_steps=1 and trained whole")
