"""The best checkpoints are evaluated again at the end, so that a lucky evaluation does not choose the policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved import events
from short_runs import short_config

from rlstable import load_policy
from rlstable.config import Config
from rlstable.io.run_folder import best_seed, read_result
from rlstable.policy.evaluator import EvaluationMetrics, Evaluator, PolicySnapshot
from rlstable.runner import after_iteration, programs
from rlstable.runner.evaluation import confirm
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result
from rlstable.supervise.memory import OutOfMemory
from rlstable.supervise.stop_reasons import StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
LUCKY = 1000.0


def learning(**sections: Any) -> Config:
    """Twelve iterations, evaluated after every third."""
    evaluation, checkpoint = {"num_evals": 4, "num_envs": 16}, {"every": 3, "asynchronous": False}
    return short_config(**{"total_steps": 12 * ITERATION, "eval": evaluation, "checkpoint": checkpoint} | sections)


class FirstEvaluationIsLucky:
    """Makes evaluators whose first evaluation gives every policy a return of `LUCKY`.

    Args:
        make: Factory of the real evaluators.
        error: Raised by every confirming evaluation, which are the fifth and later ones.
        void_from: Number of the first evaluation without a return, counted from 1.

    Attributes:
        played: Policies of each evaluation, in order.
    """

    def __init__(self, make: Any, error: Exception | None = None, void_from: float = float("inf")):
        self._make = make
        self._error = error
        self._void_from = void_from
        self.played: list[list[PolicySnapshot]] = []

    def __call__(self, *args: Any) -> Evaluator:
        made = self._make(*args)
        honest = made.evaluate

        def evaluate(policies: list[PolicySnapshot]) -> list[EvaluationMetrics]:
            self.played.append(list(policies))
            if self._error is not None and len(self.played) > 4:
                raise self._error
            found = honest(policies)
            if len(self.played) >= self._void_from:
                return [{**row, "eval/episode_reward": None} for row in found]
            return [{**row, "eval/episode_reward": LUCKY} for row in found] if len(self.played) == 1 else found

        made.evaluate = evaluate
        return made  # type: ignore[no-any-return]

    @property
    def keys(self) -> list[tuple[int, ...]]:
        """Random keys of all evaluations, in order."""
        return [tuple(np.asarray(one.key).tolist()) for policies in self.played for one in policies]


Lucky = tuple[Result, FirstEvaluationIsLucky]


def lucky_run(folder: Path, stub: Any = None, **checkpoint: Any) -> Lucky:
    evaluators = FirstEvaluationIsLucky(programs.make_evaluator, **stub or {})
    config = learning(checkpoint={"every": 3, "asynchronous": False, **checkpoint})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "make_evaluator", evaluators)
        return TrainingLoop(config, folder).run(), evaluators


def iteration_of(policy: Any) -> int:
    return int(policy.host["host"]["iteration"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Lucky:
    return lucky_run(tmp_path_factory.mktemp("confirmed"))


def test_without_confirmation_a_lucky_evaluation_chooses_the_policy(tmp_path: Path) -> None:
    result, _ = lucky_run(tmp_path, confirm_best=0)
    assert iteration_of(result.policy) == 3
    left = read_result(tmp_path) or {}
    assert left["best_return"] == left["return"] == LUCKY and "confirmed_return" not in left
    assert (left["policy_iteration"], left["policy_step"]) == (3, 3 * ITERATION)
    assert left["last_return"] == result.metrics["eval/episode_reward"]
    assert not events(tmp_path, "best_confirmed") and not events(tmp_path, "best_not_confirmed")


def test_with_confirmation_a_lucky_evaluation_does_not_choose_the_policy(run: Lucky) -> None:
    result, evaluators = run
    left = read_result(result.run_dir) or {}
    assert left["best_return"] == LUCKY
    assert left["confirmed_checkpoint"] != 3 and left["confirmed_return"] < LUCKY
    assert left["confirmed_checkpoint"] * ITERATION == left["policy_step"]
    assert left["return"] == left["confirmed_return"] == result.policy_return >= left["confirmed_last_return"]
    assert iteration_of(result.policy) == iteration_of(load_policy(result.run_dir)) == left["confirmed_checkpoint"]
    assert iteration_of(load_policy(result.run_dir, 3)) == 3
    [event] = events(result.run_dir, "best_confirmed")
    assert (event["checkpoint"], event["return"]) == (left["confirmed_checkpoint"], left["confirmed_return"])
    assert event["candidates"] == len(evaluators.played) - 4


def test_all_candidates_play_the_same_new_episodes(run: Lucky) -> None:
    _, evaluators = run
    training, confirming = evaluators.keys[:4], evaluators.keys[4:]
    assert len(confirming) >= 3 and len(set(confirming)) == 1
    assert not set(confirming) & set(training)


def test_confirmed_policy_is_the_best_of_the_candidates(run: Lucky) -> None:
    result, evaluators = run
    runner = TrainingLoop(learning(resume="auto"), result.run_dir)
    runner.close()
    evaluator = runner.programs.evaluator(runner.single.host)
    returns = [evaluator.evaluate(one)[0]["eval/episode_reward"] for one in evaluators.played[4:]]
    assert (read_result(result.run_dir) or {})["confirmed_return"] == max(returns)  # type: ignore[type-var]


def test_load_policy_chooses_by_evaluation_once_the_record_or_its_checkpoint_is_gone(
    run: Lucky, tmp_path: Path
) -> None:
    folder = shutil.copytree(run[0].run_dir, tmp_path / "run")
    confirmed = (read_result(folder) or {})["confirmed_checkpoint"]
    shutil.move(folder / "checkpoints" / str(confirmed), tmp_path / "moved")
    assert iteration_of(load_policy(folder)) == 3
    shutil.move(tmp_path / "moved", folder / "checkpoints" / str(confirmed))
    (folder / "result.json").unlink()
    assert iteration_of(load_policy(folder)) == 3


def test_damaged_candidate_is_reported_and_left_out(tmp_path: Path) -> None:
    def damage(step: int, row: Any) -> None:
        if step == 12 * ITERATION:
            for path in (tmp_path / "checkpoints" / "3" / "policy").rglob("*"):
                if path.is_file():
                    path.write_bytes(b"")

    config = learning()
    result = TrainingLoop(config, tmp_path, damage).run()
    assert result.stop_reason is StopReason.completed
    [damaged] = events(tmp_path, "checkpoint_damaged")
    [confirmed] = events(tmp_path, "best_confirmed")
    assert damaged["checkpoint"] == 3 and confirmed["checkpoint"] != 3


@pytest.mark.parametrize(
    ("stub", "field", "why"),
    [
        ({"error": OutOfMemory("no room")}, "error", "no room"),
        ({"error": RuntimeError("a device went away")}, "error", "a device went away"),
        ({"void_from": 5}, "because", "no candidate has a return"),
    ],
)
def test_failure_to_confirm_keeps_the_stop_reason_and_the_unconfirmed_best(
    tmp_path: Path, stub: Any, field: str, why: str
) -> None:
    result, _ = lucky_run(tmp_path, stub)
    assert result.stop_reason is StopReason.completed
    (event,) = events(tmp_path, "best_not_confirmed")
    assert why in event[field]
    assert iteration_of(result.policy) == 3
    assert "confirmed_return" not in (read_result(tmp_path) or {})


@pytest.mark.parametrize(
    "sections", [{"eval": {"num_evals": 0}}, {"checkpoint": {"enabled": False}}], ids=["no evaluations", "no saves"]
)
def test_run_without_scored_checkpoints_ends_without_a_confirmed_best(tmp_path: Path, sections: Any) -> None:
    assert TrainingLoop(learning(**sections), tmp_path).run().stop_reason is StopReason.completed
    assert "confirmed_return" not in (read_result(tmp_path) or {})
    assert not events(tmp_path, "best_confirmed") and not events(tmp_path, "best_not_confirmed")


def test_failed_run_confirms_its_saved_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges_in_the_eighth_iteration(metrics: Any, *args: Any) -> StopReason | None:
        return StopReason.policy_diverged if int(metrics.counters.iterations) == 8 else None

    monkeypatch.setattr(after_iteration, "cause_of", diverges_in_the_eighth_iteration)
    result = TrainingLoop(learning(), tmp_path).run()
    assert result.stop_reason is StopReason.policy_diverged
    left = read_result(tmp_path) or {}
    assert left["confirmed_checkpoint"] in (3, 6) and left["confirmed_return"] is not None
    assert iteration_of(result.policy) == left["confirmed_checkpoint"]


def test_signal_while_the_best_is_confirmed_ends_the_confirmation(run: Lucky, tmp_path: Path) -> None:
    runner = TrainingLoop(learning(resume="auto"), shutil.copytree(run[0].run_dir, tmp_path / "run"))
    runner.single.confirmed = {}
    evaluator = runner.programs.evaluator(runner.single.host)
    confirm([runner.single], evaluator.evaluate, 1, lambda _: StopReason.interrupted)
    runner.close()
    assert not runner.single.confirmed
    assert events(tmp_path / "run", "best_not_confirmed")[0]["because"] == "interrupted"


def test_completed_run_that_is_started_again_keeps_its_confirmed_best(run: Lucky, tmp_path: Path) -> None:
    folder = shutil.copytree(run[0].run_dir, tmp_path / "run")
    before = read_result(folder)
    TrainingLoop(learning(resume="auto"), folder).run()
    assert read_result(folder) == before
    assert len(events(folder, "best_confirmed")) == 1


def test_confirmed_best_is_dropped_when_training_continues(run: Lucky, tmp_path: Path) -> None:
    folder = shutil.copytree(run[0].run_dir, tmp_path / "run")
    runner = TrainingLoop(learning(resume="auto", total_steps=15 * ITERATION), folder)
    assert runner.single.confirmed
    runner.advance()
    runner.close()
    assert not runner.single.confirmed and read_result(folder) is None
    assert iteration_of(load_policy(folder)) == 3


def test_seeds_are_confirmed_together_in_full_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluators = FirstEvaluationIsLucky(programs.make_evaluator)
    monkeypatch.setattr(programs, "make_evaluator", evaluators)
    result = TrainingLoop(learning(seeds=2), tmp_path).run()
    assert result.stop_reason is StopReason.completed
    assert {len(judged) for judged in evaluators.played} == {2}
    found, candidates, iterations = {}, 0, set()
    for own in result.seeds:
        left = read_result(own.run_dir) or {}
        assert left["best_return"] == LUCKY
        assert left["confirmed_return"] < LUCKY
        assert iteration_of(own.policy) == left["confirmed_checkpoint"]
        found[own.run_dir] = left["confirmed_return"]
        iterations.add(left["confirmed_checkpoint"])
        [event] = events(own.run_dir, "best_confirmed")
        candidates += event["candidates"]
    assert iterations != {3}  # of one seed the lucky policy is indeed the best
    assert len(evaluators.played[4:]) == -(-candidates // 2)
    assert best_seed(tmp_path) == max(found, key=lambda folder: found[folder])
    whole = read_result(tmp_path) or {}
    assert whole["confirmed_return"] == pytest.approx(sum(found.values()) / 2)
