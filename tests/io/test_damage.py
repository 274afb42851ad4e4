"""Damaged checkpoints: reading returns exactly what was saved, or the checkpoint before."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstable.config import ConfigError
from rlstable.config.run import CheckpointConfig
from rlstable.io import arrays
from rlstable.io.checkpoint import Checkpoints, restore_policy

SYNC = CheckpointConfig(asynchronous=False, keep=3, keep_best=1)
TEMPLATE = {"x": np.zeros(50), "noise": np.zeros(500, np.float32), "none": np.zeros((0, 2), np.int8)}


def state_of(iteration: int) -> dict[str, Any]:
    noise = np.random.default_rng(iteration).random(500).astype(np.float32)
    return {"x": np.arange(50) + 1.0 * iteration, "noise": noise, "none": TEMPLATE["none"]}


def snapshot_of(iteration: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(-iteration % 100).random(600)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, of which the second is best."""
    folder = tmp_path_factory.mktemp("whole")
    with Checkpoints(folder, SYNC) as checkpoints:
        for i, score in ((1, 1.0), (2, 3.0), (3, 2.0)):
            assert checkpoints.save(i, state_of(i), snapshot_of(i), {"i": i}, score=score)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def files(folder: Path) -> list[Path]:
    """The files of a checkpoint; orbax gives some of them random names."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", [cut, empty, flip, Path.unlink], ids=lambda damage: damage.__name__)
def test_damaged_file_restores_the_checkpoint_before_or_does_not_matter(whole, tmp_path, damage):
    fell_back = {}
    for n, name in enumerate(files(whole / "checkpoints/3")):
        run = tmp_path / str(n)
        shutil.copytree(whole, run)
        damage(run / "checkpoints/3" / name)
        events: list[tuple[str, int]] = []
        record = lambda kind, fields, events=events: events.append((kind, fields["checkpoint"]))  # noqa: E731
        with Checkpoints(run, SYNC, record) as checkpoints:
            state, host = checkpoints.restore(TEMPLATE)
            used = fell_back[str(name)] = host["i"]
            assert events == ([] if used == 3 else [("checkpoint_damaged", 3)])
            left = ["1", "2", "3"] if used == 3 else ["1", "2", "3.damaged"]
            assert sorted(path.name for path in (run / "checkpoints").iterdir()) == left
            for key, value in state_of(used).items():
                np.testing.assert_array_equal(state[key], value)
            assert (checkpoints.latest(), checkpoints.best()) == (used, 2)
    needed = ("manifest/metadata", "state/manifest.ocdbt", "state/d/")
    assert {fell_back[name] for name in fell_back if name.startswith(needed)} == {2}
    assert {fell_back[name] for name in fell_back if name.startswith("policy/")} == {3}


def test_restored_policy_is_the_best_undamaged_one(whole, tmp_path):
    used = {}
    for n, name in enumerate(files(whole / "checkpoints/2")):
        run = tmp_path / str(n)
        shutil.copytree(whole, run)
        flip(run / "checkpoints/2" / name)
        events: list[int] = []
        policy, host = restore_policy(run, "best", lambda _, fields, events=events: events.append(fields["checkpoint"]))
        used[str(name)] = host["i"]
        np.testing.assert_array_equal(policy["w"], snapshot_of(host["i"])["w"])
        assert events == ([2] if host["i"] == 3 else [])
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2", "3"]  # a reader leaves it
    needed = ("manifest/metadata", "policy/manifest.ocdbt", "policy/d/")
    assert {used[name] for name in used if name.startswith(needed)} == {3}
    assert {used[name] for name in used if name.startswith("state/")} == {2}  # not needed for a policy


@pytest.mark.parametrize("before", [[], ["3.damaged"]])
def test_run_saves_again_under_the_number_of_a_damaged_checkpoint(run, before):
    for name in before:  # the number was damaged once already
        (run / "checkpoints" / name / "state").mkdir(parents=True)
    flip(run / "checkpoints/3/manifest/metadata")
    with Checkpoints(run, CheckpointConfig(keep=2, keep_best=1)) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}
        for i in (3, 4):
            assert checkpoints.save(i, state_of(i), snapshot_of(i), {"i": -i})
        assert checkpoints.restore(TEMPLATE)[1] == {"i": -4}
        assert (checkpoints.all(), checkpoints.best()) == ([2, 3, 4], 2)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == sorted(["2", "3", "4", *before, "3.damaged-2" if before else "3.damaged"])


def test_damaged_checkpoint_that_was_requested_by_number_is_an_error(run):
    flip(next(run.glob("checkpoints/3/policy/d/*")))
    empty(run / "checkpoints/3/manifest/metadata")
    refused = rf"^{run}/checkpoints/3: cannot be read \(JSONDecodeError: .*\); choose another checkpoint or run folder$"
    with Checkpoints(run, SYNC) as checkpoints, pytest.raises(ConfigError, match=refused):
        checkpoints.restore(TEMPLATE, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match=refused):
            restore_policy(run, 3)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2", "3"]


def test_error_names_all_checkpoints_if_none_can_be_read(run):
    for i in (1, 2, 3):
        empty(run / f"checkpoints/{i}/manifest/metadata")
    events: list[int] = []
    with Checkpoints(run, SYNC, lambda kind, fields: events.append(fields["checkpoint"])) as checkpoints:
        with pytest.raises(ConfigError) as raised:
            checkpoints.restore(TEMPLATE)
        assert checkpoints.all() == [1, 2, 3]
    why = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    assert str(raised.value) == (
        f"{run}/checkpoints: none of 3 checkpoints can be read (3: {why}; 2: {why}; 1: {why}); "
        "choose another run folder"
    )
    assert events == [3, 2, 1]


def test_checkpoint_of_another_configuration_is_not_marked_as_damaged(run):
    template = TEMPLATE | {"x": np.zeros(51)}
    flip(next(run.glob("checkpoints/3/state/d/*")))
    with Checkpoints(run, SYNC) as checkpoints:
        with pytest.raises(
            ConfigError, match=r"checkpoints/3 does not fit this configuration: x is float64\[50\] there"
        ):
            checkpoints.restore(template)
        assert checkpoints.all() == [1, 2, 3]


def test_checkpoint_under_another_number_is_noticed(run):
    (run / "checkpoints/3").rename(run / "checkpoints/7")
    events: list[str] = []
    with Checkpoints(run, SYNC, lambda _, fields: events.append(fields["error"])) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}
    assert events == ["it is checkpoint 3 under another number"]


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")], ids=["pipe", "link"])
@pytest.mark.parametrize("name", ["manifest/metadata", "another"])
def test_pipe_or_link_in_a_checkpoint_is_damage(run, plant, name):
    path = run / "checkpoints/3" / name
    path.unlink(missing_ok=True)
    plant(path)
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], Any], sign: bool) -> None:
    """Changes the manifest of a checkpoint, with or without its checksum."""
    path = checkpoint / "manifest/metadata"
    manifest = json.loads(path.read_text())
    change(manifest)
    if sign:
        del manifest["checksum"]
        manifest["checksum"] = arrays.json_checksum(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["policy"][0].__setitem__(0, ["y"]),
        lambda manifest: manifest["policy"][0].__setitem__(2, [10**7, 10**7]),
        lambda manifest: manifest.update(score="high"),
        lambda manifest: manifest.update(policy="[" * 10**5),
        lambda manifest: manifest.update(host=[]),
    ],
)
def test_edited_manifest_and_impossible_values_are_damage(run, change, sign):
    edit(run / "checkpoints/2", change, sign)
    with pytest.warns(RuntimeWarning, match="checkpoints/2 is damaged"):
        assert restore_policy(run)[1] == {"i": 3}


def test_checkpoint_with_a_damaged_score_is_kept(run):
    """A checkpoint that cannot be read might be the best."""
    flip(run / "checkpoints/2/manifest/metadata")
    with Checkpoints(run, CheckpointConfig(asynchronous=False, keep=1, keep_best=1)) as checkpoints:
        assert checkpoints.best() == 3
        for i in (4, 5):
            assert checkpoints.save(i, state_of(i), snapshot_of(i), {"i": i})
        assert checkpoints.all() == [2, 3, 5]


def test_unfinished_files_of_a_killed_process_are_no_checkpoint(run):
    folder = run / "checkpoints"
    shutil.copytree(folder / "3", folder / "4.orbax-checkpoint-tmp")  # written, not committed
    shutil.rmtree(folder / "4.orbax-checkpoint-tmp/state")
    shutil.copytree(folder / "3/state", folder / "4.orbax-checkpoint-tmp/state.orbax-checkpoint-tmp")
    (folder / "5.orbax-checkpoint-tmp").mkdir()
    assert restore_policy(run, "latest")[1] == {"i": 3}
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.all() == [1, 2, 3]
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 3}
        assert checkpoints.save(4, state_of(4), snapshot_of(4), {"i": 4})
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 4}
    assert sorted(path.name for path in folder.iterdir()) == ["2", "3", "4"]


def test_checkpoint_deleted_while_it_is_read_is_not_damaged(run, monkeypatch):
    """The trainer continues while another process loads a policy from the folder."""
    from rlstable.io import checkpoint

    real, reads = checkpoint.read_manifest, []

    def read_manifest(manager: Any, folder: Path, step: int) -> Any:
        reads.append(step)
        if len(reads) == 1:
            shutil.rmtree(folder / str(step))
        return real(manager, folder, step)

    monkeypatch.setattr(checkpoint, "read_manifest", read_manifest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restore_policy(run)[1] == {"i": 3}
    assert reads == [2, 3]


def test_checkpoint_of_another_format_is_an_error_that_says_what_to_do(run):
    edit(run / "checkpoints/3", lambda manifest: manifest.update(format=4, rlstable="7.8.9"), sign=True)
    message = (
        rf"^{run}/checkpoints/3: saved by rlstable 7\.8\.9 in checkpoint format 4, but rlstable "
        rf"{re.escape(arrays.__version__)} reads only format 3; use rlstable 7\.8\.9$"
    )
    with Checkpoints(run, SYNC) as checkpoints, pytest.raises(ConfigError, match=message):
        checkpoints.restore(TEMPLATE)
    with pytest.raises(ConfigError, match=message):
        restore_policy(run, "latest")


def test_reading_a_checkpoint_unpickles_nothing(run, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 3}
    assert restore_policy(run)[1] == {"i": 2}
