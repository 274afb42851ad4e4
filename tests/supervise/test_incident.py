"""Incident folders, complete or absent, and the bad numbers of a step in the order in which they spread."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.config.guards import QuarantineConfig
from rlstable.config.supervise import IncidentConfig
from rlstable.supervise import incident
from rlstable.supervise.incident import (
    Incidents,
    IncidentState,
    find_bad_numbers,
    group,
    in_causal_order,
    limits_of,
    magnitude,
    read,
    write,
)

ARRAYS = {
    "before/pipeline_state/q": np.arange(3, dtype=np.float32),
    "before/info/key": np.array([1, 2], np.uint32),
    "after/pipeline_state/q": np.float32([0, np.nan, 1]),
    "action": np.ones(2, np.float32),
}
FACTS = {"causes": ["quarantine/physics"], "reward": float("nan"), "action": [1.0, float("-inf")], "versions": {}}


def written(folder: Path, **facts: Any) -> Path:
    config = tiny_config(guards={}).model_dump(mode="json")
    return write(folder / "incidents" / "3-1", FACTS | {"config": config} | facts, ARRAYS)


def test_incident_that_is_written_is_read_back(tmp_path: Path) -> None:
    found = read(written(tmp_path))
    assert found.facts["reward"] is None and found.facts["action"] == [1.0, None]  # strict JSON has no such numbers
    assert found.facts["replay"].endswith("-m rlstable.replay " + str(tmp_path / "incidents" / "3-1"))
    assert found.config == tiny_config(guards={})
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
    assert list(found.part("before")) == ["pipeline_state/q", "info/key"]


def test_existing_incident_is_not_overwritten(tmp_path: Path) -> None:
    """A run that was killed before its save reaches the same incident again."""
    first = (written(tmp_path) / "incident.json").read_bytes()
    assert (written(tmp_path, causes=["another"]) / "incident.json").read_bytes() == first


def test_incident_that_a_full_disk_or_a_kill_has_cut_is_none_and_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "incidents" / "3-1"
    folder.mkdir(parents=True)
    (folder / "arrays.npz").write_bytes(b"torn")
    with pytest.raises(ConfigError, match=r"3-1: is no incident, it has no incident\.json"):
        read(folder)
    assert len(read(written(tmp_path)).arrays) == len(ARRAYS)


def _cut(name: str) -> Any:
    def cut(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-30])

    return cut


def _flip(folder: Path) -> None:
    data = bytearray((folder / "arrays.npz").read_bytes())
    data[100] ^= 1  # in the compressed data of the first array
    (folder / "arrays.npz").write_bytes(data)


DAMAGE = {
    "torn facts": (_cut("incident.json"), "is damaged (JSONDecodeError"),
    "torn arrays": (_cut("arrays.npz"), "is damaged (BadZipFile"),
    "one bit": (_flip, "is damaged ("),
    "no arrays": (lambda folder: (folder / "arrays.npz").unlink(), "is no incident, it has no arrays.npz"),
    "no facts": (lambda folder: (folder / "incident.json").unlink(), "is no incident, it has no incident.json"),
    "something else": (lambda folder: (folder / "incident.json").write_text("[1]"), "is damaged (TypeError"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_incident_is_a_one_line_error(tmp_path: Path, damage: Any, message: str) -> None:
    folder = written(tmp_path)
    damage(folder)
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert str(caught.value).startswith(f"{folder}: {message}")
    assert "\n" not in str(caught.value)


# --- which incidents are saved


def test_incident_limits_are_off_when_the_quarantine_is_off() -> None:
    limits = limits_of(tiny_config(guards={"quarantine": {"enabled": False}}).guards)
    assert limits.max_abs_state is None and limits.max_other_norm is None
    assert limits_of(tiny_config(guards={}).guards).max_abs_state == 1e10


def test_failure_to_save_an_incident_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Record:
        def take(self, _: Any) -> Any:
            return {"clock": np.zeros(1)}

        def __len__(self) -> int:
            return 1

    events: list[tuple[str, Any]] = []
    caught = IncidentState()
    about = {"config": tiny_config().model_dump(mode="json")}
    args = [], about, lambda kind, **fields: events.append((kind, fields))
    own = Incidents(tmp_path, IncidentConfig(), QuarantineConfig(), *args)
    monkeypatch.setattr(incident, "write", lambda *_: None)
    own.write(caught, incident.Slot(np.ones(1, bool), np.zeros(1, np.int32), Record()), 4, 6, {}, 8)
    assert [kind for kind, _ in events] == ["incident_failed"]
    assert caught == IncidentState(0, 6)  # the next attempt comes after the window


LIMITS = QuarantineConfig()
NOTHING_ELSE = QuarantineConfig(**dict.fromkeys(name for name in QuarantineConfig.model_fields if name != "enabled"))
HEALTHY = {
    "action": np.ones(2, np.float32),
    "pipeline_state/qpos": np.ones(3, np.float32),
    "pipeline_state/qacc": np.full(3, 1e7, np.float32),
    "pipeline_state/contact/dist": np.full(2, 1e7, np.float32),
    "obs/state": np.ones(4, np.float32),
    "reward": np.float32(1.0),
    "done": np.float32(1.0),
    "metrics/speed": np.float32(1e7),
    "info/key": np.array([7, 2**32 - 1], np.uint32),
}  # fmt: skip


def bad(limits: QuarantineConfig = LIMITS, **changed: Any) -> list[str]:
    arrays = HEALTHY | {name: np.asarray(x) for name, x in changed.items()}
    return [str(one) for one in find_bad_numbers(arrays, limits)]


def test_healthy_step_has_no_bad_number() -> None:
    assert bad() == []


BEYOND = "beyond guards.quarantine.max_abs"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pipeline_state/qpos", [0.0, np.nan, np.inf], "[1] = nan (not finite)"),
        ("pipeline_state/qpos", [0.0, 0.0, -2e10], f"[2] = -2e+10 ({BEYOND}_state=1e+10)"),
        ("pipeline_state/qacc", [2e10, 0.0, 0.0], f"[0] = 2e+10 ({BEYOND}_acceleration=1e+10)"),
        ("obs/state", [[0.0, 0.0], [2e12, 0.0]], f"[1, 0] = 2e+12 ({BEYOND}_observation=1e+12)"),
        ("reward", -np.inf, " = -inf (not finite)"),
        ("done", 2.0, " = 2 (beyond 1)"),
        ("info/energy", np.float32([1.0, 2e15]), "[1] = 2e+15 (the norm of all info is beyond 1e+15)"),
    ],
)
def test_number_beyond_the_limit_of_its_kind_is_bad(name: str, value: Any, text: str) -> None:
    assert bad(**{name: np.asarray(value, np.float32)}) == [name + text]


def test_without_limits_only_non_finite_numbers_are_bad() -> None:
    assert bad(NOTHING_ELSE, **{"pipeline_state/qpos": np.float32([1e30, 0, 0])}) == []
    assert bad(NOTHING_ELSE, reward=np.float32(np.nan)) == ["reward = nan (not finite)"]


def test_arrays_are_sorted_in_the_order_in_which_a_bad_number_spreads() -> None:
    names = ["info/x", "reward", "obs", "pipeline_state/xpos", "pipeline_state/qpos", "pipeline_state/qvel", "action"]
    names += ["pipeline_state/qacc", "done", "metrics/a", "other"]
    assert in_causal_order(names) == [
        "action", "pipeline_state/qacc", "pipeline_state/qvel", "pipeline_state/qpos", "pipeline_state/xpos", "obs",
        "reward", "done", "metrics/a", "info/x", "other",
    ]  # fmt: skip
    assert group("data/qpos") == group("pipeline_state/q") == "physics"


def test_magnitude_is_the_largest_finite_number() -> None:
    assert magnitude(np.float32([1, -3, np.nan, np.inf])) == 3.0
    assert magnitude(np.float32([np.nan])) == magnitude(np.zeros(0)) == 0.0
