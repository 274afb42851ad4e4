"""Environments as users write them are learned with the default guards as well as without guards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rlstable

SMALL = {
    "num_envs": 32, "batch_size": 32, "num_minibatches": 8, "unroll_length": 16, "learning_rate": 1e-3,
}  # fmt: skip
SEEDS = 3


def returns_of(folder: Path, name: str, guards: str, **keys: Any) -> list[float]:
    """Returns of the last evaluation of three seeds after 400,000 steps."""
    rlstable.fit(
        f"users:{name}", run_dir=folder, seeds=SEEDS, guards=guards, total_steps=400_000, network="small", ppo=SMALL,
        devices=1, logging="quiet", checkpoint="off", overrides=["ppo=default", "env.episode_length=100"], **keys,
    )  # fmt: skip
    return [json.loads((folder / f"seed-{seed}" / "result.json").read_text())["last_return"] for seed in range(SEEDS)]


@pytest.mark.slow
def test_command_that_begins_late_is_learned_with_guards(tmp_path: Path) -> None:
    """The command is constant for 3,000 steps of every environment. Once the bounds forbade the correction for ever."""
    evaluation = {"num_envs": 16, "env_kwargs": {"late": 1}}
    returns = returns_of(tmp_path / "run", "LateCommand", "default", eval=evaluation)
    assert min(returns) > 80.0, returns
    for seed in range(SEEDS):
        lines = (tmp_path / "run" / f"seed-{seed}" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        assert not [event for event in events if event["kind"] in ("rolled_back", "guard_tripped")]
        (sign,) = [e for e in events if e["kind"] == "sign" and e["sign"] == "observation_began_to_vary"]
        assert sign["text"].startswith("element 2 of the observation had been constant")
