"""Damaged checkpoints: reading returns exactly what was saved, or the checkpoint before."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
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
from rlstable.io import manifest as manifests
from rlstable.io.checkpoint import Checkpoints
from rlstable.io.saved_policy import restore_policy

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


DAMAGES: list[Callable[[Path], None]] = [cut, empty, flip, Path.unlink]
# The files of a checkpoint by their role; orbax gives those below `d` random names. What is read is what counts, and
# what is not is there to show that it does not matter.
READ = ["host/metadata", "manifest/metadata", "state/manifest.ocdbt", "state/d/*", "state/ocdbt.process_0/d/*"]
ROLES = [
    *READ,
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    *(f"{item}/commit_success.txt" for item in ("host", "manifest", "state", "policy")),
    *(f"{item}/_METADATA" for item in ("state", "policy")),
    "policy/manifest.ocdbt",
    "policy/d/*",
    "policy/ocdbt.process_0/d/*",
    *(f"{item}/ocdbt.process_0/manifest.ocdbt" for item in ("state", "policy")),
]


def files(folder: Path, role: str) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.glob(role))


def test_every_file_of_a_checkpoint_is_covered_by_the_damage_tests(whole):
    folder = whole / "checkpoints/3"
    known = {path for role in ROLES for path in files(folder, role)}
    assert {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} == known


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("role", [*READ, "_CHECKPOINT_METADATA", "commit_success.txt", "policy/d/*"])
def test_damaged_file_restores_the_checkpoint_before_or_does_not_matter(whole, tmp_path, role, damage):
    fell_back = []
    for n, name in enumerate(files(whole / "checkpoints/3", role)):
        run = tmp_path / str(n)
        shutil.copytree(whole, run)
        damage(run / "checkpoints/3" / name)
        events: list[tuple[str, dict[str, Any]]] = []
        with Checkpoints(run, SYNC, lambda kind, fields, events=events: events.append((kind, fields))) as checkpoints:
            state, host = checkpoints.restore(TEMPLATE)
            used = host["i"]
            left = ["1", "2", "3"] if used == 3 else ["1", "2", "3.damaged"]
            assert sorted(path.name for path in (run / "checkpoints").iterdir()) == left
            if used == 3:
                assert events == []
            else:
                assert used == 2
                [(kind, fields)] = events
                assert (kind, fields["iteration"]) == ("checkpoint_damaged", 3)
                assert fields["error"] and "\n" not in fields["error"]
            fell_back.append(used == 2)
            for key, value in state_of(used).items():
                np.testing.assert_array_equal(state[key], value)
            assert (checkpoints.latest(), checkpoints.best()) == (used, 2)
    if role in READ[:3] or (role in READ and role.startswith("state/d")):
        assert all(fell_back)
    elif role in READ:
        assert any(fell_back)  # orbax leaves some files there that nothing refers to
    elif not role.endswith("_METADATA"):
        assert not any(fell_back)


@pytest.mark.parametrize(
    ("role", "damage"),
    [("host/metadata", cut), ("manifest/metadata", Path.unlink), ("policy/manifest.ocdbt", flip), ("policy/d/*", flip),
     ("state/d/*", flip), ("commit_success.txt", Path.unlink)],
)  # fmt: skip
def test_restored_policy_is_the_best_undamaged_one(whole, tmp_path, role, damage):
    for n, name in enumerate(files(whole / "checkpoints/2", role)):
        run = tmp_path / str(n)
        shutil.copytree(whole, run)
        damage(run / "checkpoints/2" / name)
        events: list[tuple[str, dict[str, Any]]] = []
        policy, host = restore_policy(run, "best", lambda kind, fields, events=events: events.append((kind, fields)))
        assert host["i"] in (2, 3)
        np.testing.assert_array_equal(policy["w"], snapshot_of(host["i"])["w"])
        assert [(kind, fields["iteration"]) for kind, fields in events] == (
            [("checkpoint_damaged", 2)] if host["i"] == 3 else []
        )
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["1", "2", "3"]  # a reader leaves it
        if role in ("host/metadata", "manifest/metadata", "policy/manifest.ocdbt", "policy/d/*"):
            assert host["i"] == 3
        if role.startswith("state/"):
            assert host["i"] == 2  # a policy does not need the training state


@pytest.mark.parametrize(("role", "asynchronous"), [(READ[0], False), (READ[3], True)])
def test_run_saves_again_under_the_number_of_a_damaged_checkpoint(run, role, asynchronous):
    flip(next(run.glob(f"checkpoints/3/{role}")))
    config = CheckpointConfig(asynchronous=asynchronous, keep=2, keep_best=1)
    with Checkpoints(run, config) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}
        for i in (3, 4):
            assert checkpoints.save(i, state_of(i), snapshot_of(i), {"i": -i})
        assert checkpoints.restore(TEMPLATE)[1] == {"i": -4}
        assert (checkpoints.all(), checkpoints.best()) == ([2, 3, 4], 2)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["2", "3", "3.damaged", "4"]


def test_damaged_checkpoint_that_was_requested_by_number_is_an_error(run):
    flip(next(run.glob("checkpoints/3/policy/d/*")))
    empty(run / "checkpoints/3/host/metadata")
    refused = rf"^{run}/checkpoints/3: cannot be read \(JSONDecodeError: .*\); choose another iteration or run folder$"
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
    with Checkpoints(run, SYNC, lambda kind, fields: events.append(fields["iteration"])) as checkpoints:
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


@pytest.mark.parametrize(
    "edit",
    [
        lambda data: data["host"].update(i=4),
        lambda data: data["manifest"].update(format=3),
        lambda data: data["manifest"].pop("checksum"),
        lambda data: data["manifest"]["state"].pop(),
        lambda data: data["manifest"]["state"][0].__setitem__(0, ["y"]),
        lambda data: data["manifest"]["policy"][0].__setitem__(3, 0),
    ],
)
def test_edited_json_of_a_checkpoint_is_noticed(run, edit):
    paths = {item: run / f"checkpoints/3/{item}/metadata" for item in ("host", "manifest")}
    data = {item: json.loads(path.read_text()) for item, path in paths.items()}
    edit(data)
    for item, path in paths.items():
        path.write_text(json.dumps(data[item]))
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.best() == 2
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}


def test_checkpoint_under_another_number_is_noticed(run):
    (run / "checkpoints/3").rename(run / "checkpoints/7")
    events: list[str] = []
    with Checkpoints(run, SYNC, lambda _, fields: events.append(fields["error"])) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}
    assert events == ["it is checkpoint 3 under another number"]


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")], ids=["pipe", "link"])
@pytest.mark.parametrize("name", ["host/metadata", "state/manifest.ocdbt", "another"])
def test_pipe_or_link_in_a_checkpoint_is_damage(run, plant, name):
    path = run / "checkpoints/3" / name
    path.unlink(missing_ok=True)
    plant(path)
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 2}


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["policy"][0].__setitem__(2, [10**7, 10**7]),
        lambda manifest: manifest.update(score="high"),
        lambda manifest: manifest.update(policy="[" * 10**5),
    ],
)
def test_manifest_with_a_valid_checksum_and_impossible_values_is_damage(run, change):
    path = run / "checkpoints/2/manifest/metadata"
    manifest = json.loads(path.read_text())
    del manifest["checksum"]
    change(manifest)
    path.write_text(json.dumps({**manifest, "checksum": manifests.json_checksum(manifest)}))
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
    from rlstable.io import saved_policy

    real, reads = saved_policy.read_json, []

    def read_json(manager: Any, folder: Path, step: int) -> Any:
        reads.append(step)
        if len(reads) == 1:
            shutil.rmtree(folder / str(step))
        return real(manager, folder, step)

    monkeypatch.setattr(saved_policy, "read_json", read_json)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert restore_policy(run)[1] == {"i": 3}
    assert reads == [2, 3]


def test_checkpoint_of_another_format_is_an_error_that_says_what_to_do(run, monkeypatch):
    with monkeypatch.context() as newer:
        newer.setattr(manifests, "FORMAT", 3)
        newer.setattr(manifests, "__version__", "7.8.9")
        with Checkpoints(run, SYNC) as checkpoints:
            assert checkpoints.save(4, state_of(4), snapshot_of(4), {"i": 4})
    shutil.rmtree(run / "checkpoints/4/host")  # another format may hold other items
    message = (
        rf"^{run}/checkpoints/4: saved by rlstable 7\.8\.9 in checkpoint format 3, but rlstable "
        rf"{re.escape(manifests.__version__)} reads only format 2; use rlstable 7\.8\.9$"
    )
    with Checkpoints(run, SYNC) as checkpoints:
        with pytest.raises(ConfigError, match=message):
            checkpoints.restore(TEMPLATE)
        assert checkpoints.latest() == 4
    with pytest.raises(ConfigError, match=message):
        restore_policy(run, "latest")
    assert restore_policy(run, 3)[1] == {"i": 3}


def test_checkpoints_contain_no_pickles(run, monkeypatch):
    for path in run.rglob("*"):
        if path.is_file():
            with pytest.raises(Exception):  # noqa: B017  whatever it finds first that is no pickle
                list(pickletools.genops(path.read_bytes()))

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(np, "load", refuse)
    with Checkpoints(run, SYNC) as checkpoints:
        assert checkpoints.restore(TEMPLATE)[1] == {"i": 3}
    assert restore_policy(run)[1] == {"i": 2}
