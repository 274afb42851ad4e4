"""The return watch of one seed: which state is the best one, and when a fall is no reason for a rollback."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from toys import assemble, tiny_config

from rlstable.runner.decision import ReturnCheck
from rlstable.runner.host_state import HostState
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.snapshots import Snapshots


class Run:
    """A return watch with made-up returns; every iteration keeps the state under its number."""

    def __init__(self) -> None:
        config = tiny_config(guards={"return_watch": {"episodes": 1}}, supervise={}, total_steps=10**9)
        self.host, self.events = HostState(), []
        self.snapshots = Snapshots(None)
        keep: Any = lambda kind, **fields: self.events.append({"kind": kind, **fields})  # noqa: E731
        self.check = ReturnCheck(
            config.guards.return_watch,
            config.total_steps,
            self.host,
            SimpleNamespace(comparison=None),
            self.snapshots,
            keep,
            config.watches_return,
        )  # type: ignore[arg-type]
        self.state = assemble(config)[1]
        self.total = 0

    def iterate(self, training: float, evaluation: float | None = None) -> bool:
        """Whether the best policy must be compared with the present one."""
        self.host.iteration += 1
        self.total += 1
        metrics = SimpleNamespace(
            healthy=True, counters=SimpleNamespace(episodes=self.total), values={"episode/sum_reward": training}
        )
        self.check.train(metrics)  # type: ignore[arg-type]
        suspects = self.check.suspects({} if evaluation is None else {"eval/episode_reward": evaluation})
        self.check.keep(self.state)
        return suspects

    def compare(self, best: float, now: float) -> bool:
        self.check.compare(np.full(16, best), np.full(16, now))
        return self.check.collapsed

    @property
    def best(self) -> int:
        return self.snapshots.best.iteration


@pytest.fixture
def run() -> Run:
    return Run()


def test_training_chooses_the_best_state_only_before_the_first_evaluation(run: Run) -> None:
    """A curriculum that only training sees: its return rises where evaluations fall."""
    for n in range(10):
        run.iterate(float(n))
    assert 0 < run.best < 10
    run.iterate(10.0, 19.75)
    for n in range(30):
        run.iterate(11.0 + n, -0.84 if n % 10 == 9 else None)
    assert run.best == 11


@pytest.mark.parametrize(("length", "enabled"), [(100_000, True), (100_001, False)])
def test_episodes_that_evaluations_may_not_play_are_not_played_by_the_return_watch(
    length: int, enabled: bool, tmp_path: Path, shared_programs: None
) -> None:
    config = tiny_config(guards={}, supervise={}, eval={"num_evals": 0}, env={"episode_length": length}, devices=1)
    run = TrainingLoop(config, tmp_path / "run")
    run.close()
    assert run.single.return_check.enabled is config.watches_return is enabled


def test_refuted_fall_does_not_let_a_lower_evaluation_replace_the_best_state(run: Run) -> None:
    for n in range(20):
        run.iterate(float(n), float(n))
    run.compare(19.0, 12.0)
    run.iterate(12.0, 13.0)
    assert run.best == 20


def test_fall_that_training_does_not_show_is_unclear_and_no_collapse(run: Run) -> None:
    for n in range(40):
        run.iterate(float(n), float(n) if n < 20 else -1.0)
    assert [run.compare(19.0, -20.0) for _ in range(2)] == [False, False]
    assert [event["kind"] for event in run.events] == ["return_fall_unclear"] * 2
    for _ in range(10):
        run.iterate(-20.0)
    assert run.compare(19.0, -20.0) is True
