"""The notebook about Playground runs from top to bottom with small settings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("mujoco_playground")

from test_notebooks import executed, kinds, printed

SMALL = (
    "devices=1 total_steps=1024 env.episode_length=20 eval.num_evals=1 eval.at_start=false eval.num_envs=4 "
    "ppo.num_envs=16 ppo.batch_size=16 ppo.num_minibatches=2 ppo.num_updates_per_batch=1 ppo.unroll_length=16 "
    "ppo.num_resets_per_eval=0 network=small env.reset_pool_size=8"
)


@pytest.mark.slow
def test_notebook_trains_shows_and_breaks_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSTABLE_OVERRIDES", SMALL)
    notebook = executed("playground", tmp_path, monkeypatch)
    said = printed(notebook)
    assert "1,024 steps, 16 environments, 16 steps an unroll" in said
    assert "learning rate 0.001, discounting 0.995, episodes of 20 steps" in said
    assert "text/html" in kinds(notebook)
    (trips,) = re.findall(r"guard trips: (.*)", said)
    assert "guards/quarantine/trips" in trips and "'kind': 'guard_tripped'" in said
