"""Exit code 0 means that the folder holds the last or the best policy of the run, saved and finite."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from short_runs import short_config
from toys import assert_same

from rlstable.config import Config
from rlstable.device import hosts
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.console import Console
from rlstable.io.run_folder import read_result, steps_in
from rlstable.policy.policy import load_policy
from rlstable.runner import loop
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.stopping import StopRequest
from rlstable.supervise.stop_reasons import SAVED, StopReason

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
ITERATION = 64
LAST = 8


def quick(**sections: Any) -> Config:
    """Eight iterations, each saved."""
    checkpoint = {"every": 1, "keep": 2, "asynchronous": False}
    defaults = {"total_steps": LAST * ITERATION, "logging": {"console": "lines"}, "checkpoint": checkpoint}
    return short_config(**defaults | sections)


def fail_after(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Makes every save of a later iteration fail, also the retry."""
    begin = Checkpoints._begin

    def broken(self: Checkpoints, number: int, *args: Any) -> None:
        if number > iteration:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        begin(self, number, *args)

    monkeypatch.setattr(Checkpoints, "_begin", broken)


def advanced(folder: Path, minutes: list[float], **checkpoint: Any) -> tuple[TrainingLoop, list[list[int]]]:
    """A run whose iterations end at these minutes, and the checkpoints that lie on disk after each iteration."""
    config = quick(
        total_steps=100 * ITERATION, checkpoint={"every": 100, "keep": 9, "asynchronous": False, **checkpoint}
    )
    run = TrainingLoop(config, folder)
    now, found = [0.0], []
    run.single.saving._clock = lambda: 60.0 * now[0]
    run.single.saving._saved_at = 0.0
    for now[0] in minutes:
        assert not run.advance()
        found.append(steps_in(folder / "checkpoints"))
    run.close()
    return run, found


def test_checkpoint_is_due_some_minutes_after_the_last_one(tmp_path: Path) -> None:
    """By default after five minutes, counted from the start or from any save."""
    _, found = advanced(tmp_path / "default", [3, 4.9, 5, 9.9, 10.1, 30])
    assert found == [[], [], [3], [3], [3, 5], [3, 5, 6]]
    _, found = advanced(tmp_path / "more", [3, 6, 9, 13], every=2)
    assert found == [[], [2], [2], [2, 4]]
    assert advanced(tmp_path / "never", [100, 1000], every_minutes=None)[1] == [[], []]
    assert advanced(tmp_path / "off", [100, 1000], enabled=False)[1] == [[], []]


def test_checkpoints_by_time_do_not_change_what_is_trained_and_saved(tmp_path: Path) -> None:
    often, found = advanced(tmp_path / "often", [5, 10, 15], every=3)
    once, _ = advanced(tmp_path / "once", [1, 2, 3], every=3)
    assert found[-1] == [1, 2, 3]
    assert_same(often.single.state, once.single.state)
    saved = [load_policy(tmp_path / name, "latest").host["host"] for name in ("often", "once")]
    for host in saved:
        del host["elapsed"]
    assert saved[0] == saved[1]


def test_clock_of_any_process_asks_all_processes_for_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the writer's clock is asked, so `saves` is false in the other processes."""
    request = StopRequest(Console("off", 1), lambda reason: reason, str, limit=10.0)
    asked: list[int] = []
    for theirs, agreed in ((0, None), (1, None), (2, StopReason.time_limit), (5, StopReason.interrupted)):
        monkeypatch.setattr(hosts, "largest", lambda own, theirs=theirs: asked.append(own) or max(own, theirs))
        assert request.agreed(0.0) == (agreed, bool(theirs % 2))
    assert request.agreed(11.0, True)[0] is StopReason.interrupted
    assert asked == [0, 0, 0, 0, 3]


def test_checkpoints_of_a_period_are_kept_after_iterations_were_lost(tmp_path: Path) -> None:
    """Saves are due by number, as the period counts."""
    checkpoint = {"every": 2, "keep": 1, "keep_best": 0, "keep_period": 4, "asynchronous": False}
    run = TrainingLoop(quick(total_steps=100 * ITERATION, checkpoint=checkpoint), tmp_path)
    for _ in range(9):
        run.advance()
        run.single.host.attempts.lost_iterations = max(run.single.host.attempts.lost_iterations, 1)
    run.close()
    assert steps_in(tmp_path / "checkpoints") == [4, 8, 10]


def test_steps_after_a_rollback_that_no_checkpoint_has_are_unsaved(tmp_path: Path, monkeypatch: Any) -> None:
    """The newest checkpoint is of the abandoned attempt, whose steps were more."""
    run = TrainingLoop(quick(total_steps=100 * ITERATION), tmp_path)
    for _ in range(4):
        run.advance()
    fail_after(monkeypatch, 4)
    host = run.single.host
    host.attempts.lost_iterations, host.attempts.lost_steps = 3, 3 * ITERATION
    host.iteration, host.step = 1, ITERATION
    run.advance()
    assert run.single.saving.unsaved_steps() >= ITERATION
    assert run.single.saving.final_stop_reason(StopReason.stopped, run.single.state) is StopReason.not_saved
    run.close()


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "not saved"])
def test_run_with_exit_code_0_has_saved_its_last_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool
) -> None:
    """All stop reasons, of a run whose last state is saved and of a run whose last state is not."""
    if not saves:
        fail_after(monkeypatch, 1)
    runner = TrainingLoop(quick(total_steps=3 * ITERATION), tmp_path)
    assert not runner.advance() and not runner.advance()
    saving, state = runner.single.saving, runner.single.state
    final = {ending: saving.final_stop_reason(ending, state) for ending in StopReason}
    runner.close()
    assert steps_in(tmp_path / "checkpoints") == ([1, 2] if saves else [1])
    assert StopReason.not_saved.exit_code == 13 and not StopReason.not_saved.succeeded
    for asked, ending in final.items():
        assert ending is (StopReason.not_saved if asked in SAVED and not saves else asked)
        assert saves or ending.exit_code != 0
        # Failures and signals keep their stop reason; a queue that restarts after exit code 75 must not loop for ever.
        assert (
            asked in (StopReason.completed, StopReason.target_reached, StopReason.stopped, StopReason.time_limit)
            or ending is asked
        )
    assert {ending for ending in StopReason if ending.exit_code == 0} <= set(SAVED)


def test_run_whose_last_states_are_bad_hands_over_its_last_good_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def short(total: int, **more: Any) -> Config:
        storm = {"site": "reward", "probability": 1.0, "start": 2, "iterations": 2}
        supervise = {"incident": {"enabled": False}}
        return quick(total_steps=total * ITERATION, fault=storm, supervise=supervise, checkpoint={}, **more)

    good = TrainingLoop(short(2), tmp_path / "good")
    good.run()
    run = TrainingLoop(short(4), tmp_path / "run")
    result = run.run()
    assert (result.stop_reason, result.step) == (StopReason.completed, 4 * ITERATION)
    left = read_result(tmp_path / "run")
    assert left is not None and left.keys().isdisjoint({"unsaved_steps", "advice", "fallen_return"})
    assert (left["policy_iteration"], left["policy_step"], left["policy_is_last"]) == (2, 2 * ITERATION, False)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"policy iteration 2, step {2 * ITERATION}, not the last state" in printed
    for name in ("params", "opt_state", "normalizer", "guard_memory"):
        assert_same(getattr(run.single.state, name), getattr(good.single.state, name))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    resumed = [TrainingLoop(short(8, resume="auto"), tmp_path / name) for name in ("run", "copy")]
    for one in resumed:
        assert (one.single.host.step, one.single.snapshots.last_good.iteration) == (4 * ITERATION, 4)
    assert_same(resumed[0].single.state.env_state, run.single.state.env_state)
    assert_same(resumed[0].single.state.params, run.single.state.params)
    assert [one.run().stop_reason for one in resumed] == [StopReason.completed] * 2
    assert_same(*(one.single.state for one in resumed))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replaced_by_a_run(folder: Path) -> None:
    shutil.rmtree(folder)
    TrainingLoop(quick(seed=1, total_steps=ITERATION), folder).run()


@pytest.mark.parametrize("lose", [shutil.rmtree, replaced_by_a_run])
@pytest.mark.parametrize("at", [4, LAST], ids=["midway", "at the end"])
def test_run_whose_folder_is_gone_ends_as_not_saved_at_the_next_save(
    tmp_path: Path, lose: Callable[[Path], None], at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, left = tmp_path / "run", {}

    def watch(step: int, _: Any) -> None:
        if step == at * ITERATION:
            lose(folder)
            left.update(contents(folder) if folder.is_dir() else {})

    result = TrainingLoop(quick(), folder, watch).run()
    assert (result.stop_reason, result.stop_reason.exit_code) == (StopReason.not_saved, 13)
    assert result.step == at * ITERATION
    assert f"The run folder {folder} was deleted, moved or replaced" in " ".join(capsys.readouterr().out.split())
    assert (contents(folder) if folder.is_dir() else {}) == left


def test_folder_that_is_deleted_after_the_last_save_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(loop, "confirm", lambda *_: shutil.rmtree(folder))  # between the last save and the end
    assert TrainingLoop(quick(), folder).run().stop_reason is StopReason.not_saved
    assert not folder.exists()
