"""Retention of checkpoints, their numbers after a rollback, and failing disks."""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rlstable.config.run import CheckpointConfig
from rlstable.io import store
from rlstable.io.checkpoint import Checkpoints, restore_policy
from rlstable.io.run_folder import steps_in

POLICY = {"w": np.ones(2, np.float32)}


def save_scores(checkpoints: Checkpoints, scores: dict[int, float | None], **host: object) -> None:
    for number, score in scores.items():
        assert checkpoints.save(number, {"x": np.full(2, number)}, POLICY, {"i": number, **host}, score=score)


def test_retention_keeps_latest_best_and_every_period(tmp_path):
    config = CheckpointConfig(keep=2, keep_best=2, keep_period=4, asynchronous=False)
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {1: 5.0, 2: 9.0, 3: 1.0, 4: 2.0, 5: 7.0, 6: 3.0, 7: None, 9: math.nan})
        assert checkpoints.all() == [2, 4, 5, 7, 9]
        assert (checkpoints.latest(), checkpoints.best()) == (9, 2)
    with Checkpoints(tmp_path, config) as checkpoints:  # scores are read back from the disk
        save_scores(checkpoints, {10: 8.0})
        assert checkpoints.all() == [2, 4, 9, 10]
        assert checkpoints.best() == 2


def test_scores_of_another_task_are_kept_and_not_compared(tmp_path):
    config = CheckpointConfig(keep=1, keep_best=1, asynchronous=False)
    easy, hard = ({"env": {"kwargs": {"height": height}}} for height in (1, 2))
    with Checkpoints(tmp_path, config, settings=easy) as checkpoints:
        save_scores(checkpoints, {1: 90.0, 2: 80.0}, config=easy)
        assert checkpoints.best() == 1
    with Checkpoints(tmp_path, config, settings=hard) as checkpoints:
        assert checkpoints.best() is None
        save_scores(checkpoints, {3: None}, config=hard)
        assert checkpoints.best() is None and restore_policy(tmp_path, "best")[1]["i"] == 3
    with Checkpoints(tmp_path, config, settings=hard) as checkpoints:
        save_scores(checkpoints, {4: 7.0, 5: 5.0, 6: 6.0}, config=hard)
        assert (checkpoints.all(), checkpoints.ranked()) == ([1, 4, 6], [(4, 7.0), (6, 6.0)])
        assert checkpoints.candidates(1) == [4, 1, 6]  # the run evaluates them again, with the same episodes
    assert restore_policy(tmp_path, "best")[1]["i"] == 4


def test_confirmed_checkpoint_of_a_run_that_is_resumed_is_kept(tmp_path):
    config = CheckpointConfig(keep=1, keep_best=1, asynchronous=False)
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {1: 9.0, 2: 8.0})
    (tmp_path / "result.json").write_text('{"confirmed_checkpoint": 2, "confirmed_return": 8.5}')
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {3: 5.0})
        (tmp_path / "result.json").unlink()  # the run trains
        checkpoints._give_up(4, OSError())
        save_scores(checkpoints, {5: 6.0})
        assert (checkpoints.all(), checkpoints.candidates(1)) == ([1, 2, 5], [1, 2, 5])


def test_checkpoints_in_a_folder_with_special_characters_are_read_back(tmp_path):
    name = "läuf, 'x' = \"y\" {a} (1)"
    with Checkpoints(tmp_path / name, CheckpointConfig(asynchronous=False)) as checkpoints:
        save_scores(checkpoints, {1: None})
        assert checkpoints.restore({"x": np.zeros(2, int)})[1] == {"i": 1}
    assert restore_policy(tmp_path / name, "latest")[1] == {"i": 1}


def test_failures_of_saves_are_not_said_again_by_asyncio(tmp_path, caplog):
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        save_scores(checkpoints, {1: None})
    caplog.clear()
    for said in ("runs/x/state.orbax-checkpoint-tmp/: No space left", "a task of the user"):
        logging.getLogger("asyncio").error("Future exception was never retrieved: %s", said)
    assert [record.getMessage() for record in caplog.records] == [
        "Future exception was never retrieved: a task of the user"
    ]


def test_missing_and_nan_scores_are_never_best(tmp_path):
    config = CheckpointConfig(keep=1, keep_best=3, asynchronous=False)
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {1: None, 2: math.nan, 3: -math.inf})
        assert checkpoints.all() == [3]
        assert checkpoints.best() is None
    assert restore_policy(tmp_path, "best")[1] == {"i": 3}  # nothing is scored: the latest
    assert json.loads((tmp_path / "checkpoints/3/manifest/metadata").read_text())["score"] is None


@pytest.mark.parametrize("asynchronous", [True, False])
def test_number_that_is_taken_is_a_failed_save_that_changes_no_checkpoint(tmp_path, asynchronous):
    events = []
    config = CheckpointConfig(asynchronous=asynchronous)
    with Checkpoints(tmp_path, config, lambda kind, fields: events.append((kind, fields["checkpoint"]))) as checkpoints:
        save_scores(checkpoints, {2: 2.0})
        assert not checkpoints.save(2, {"x": np.zeros(2, int)}, POLICY, {"i": -2})
        assert checkpoints.restore({"x": np.zeros(2, int)})[1] == {"i": 2}
        save_scores(checkpoints, {3: 0.0})
        assert (checkpoints.all(), checkpoints.best()) == ([2, 3], 2)
    assert events == [("checkpoint_failed", 2), ("checkpoint_saved_again", 3)]


def test_unwritable_checkpoint_folder_is_an_event_and_no_crash(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    events = []
    with Checkpoints(tmp_path, CheckpointConfig(), lambda kind, fields: events.append((kind, fields))) as checkpoints:
        assert not checkpoints.save(3, {"x": np.ones(2)}, POLICY, {})
        assert [(kind, fields["checkpoint"]) for kind, fields in events] == [("checkpoint_failed", 3)]
        assert events[0][1]["error"].startswith("FileExistsError: ")
        assert checkpoints.latest() is None
        (tmp_path / "checkpoints").unlink()  # mended: the next save succeeds
        assert checkpoints.save(4, {"x": np.ones(2)}, POLICY, {})
        assert checkpoints.all() == [4]
    assert events[1:] == [("checkpoint_saved_again", {"checkpoint": 4, "failures": 1})]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_failed_save_keeps_the_last_checkpoint_and_is_retried_with_growing_delay(tmp_path, asynchronous):
    """A limit of the file size stands in for a full disk; test_full_disk.py has a real one."""
    events, tried = [], []
    config = CheckpointConfig(every=100, keep=1, keep_best=0, asynchronous=asynchronous)
    noise = {"x": np.random.default_rng(0).random(400_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, config, lambda kind, fields: events.append((kind, fields["checkpoint"]))) as checkpoints:
        save_scores(checkpoints, {100: None})
        assert checkpoints.wait()
        try:
            for iteration in range(101, 232):
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000 if iteration < 220 else soft, hard))
                if checkpoints.due(iteration):
                    tried.append(iteration)
                    begun = checkpoints.save(iteration, noise, POLICY, {"i": iteration})
                    assert iteration > 200 or begun == asynchronous
                    assert (checkpoints.wait() and begun) == (iteration > 220)
                    if iteration < 220:
                        assert checkpoints.all() == [100]
                        assert checkpoints.restore({"x": np.zeros(2, int)})[1] == {"i": 100}
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert tried == [200, 201, 203, 207, 215, 231]  # 200 is a set time; then 1, 2, 4, 8, 16 later
        assert checkpoints.all() == [231]
        np.testing.assert_array_equal(checkpoints.restore({"x": np.zeros(400_000)})[0]["x"], noise["x"])
    assert events == [*(("checkpoint_failed", number) for number in tried[:-1]), ("checkpoint_saved_again", 231)]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["231"]  # nothing torn is left


def test_crash_while_deleting_a_checkpoint_leaves_no_damaged_checkpoint(tmp_path, monkeypatch):
    """A checkpoint is renamed before its files are deleted."""
    config = CheckpointConfig(keep=1, keep_best=0, asynchronous=False)
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {1: None})
        with monkeypatch.context() as crashed:
            crashed.setattr("rlstable.io.store.shutil.rmtree", lambda *_, **__: None)
            save_scores(checkpoints, {2: None})
        assert [path.name for path in (tmp_path / "checkpoints/.retired").iterdir()] == ["1"]
        assert steps_in(tmp_path / "checkpoints") == [2]
    with Checkpoints(tmp_path, config) as checkpoints:
        save_scores(checkpoints, {3: None})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


def test_traceback_of_a_closed_event_loop_is_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: shown.append(str(raised.exc_value)))
    store._drop_lines_of_orbax.__wrapped__()
    for text in ("Event loop is closed", "another error"):
        sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError(text)))
    assert shown == ["another error"]
