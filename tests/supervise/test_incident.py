"""Incident folders: complete or absent, and rejected when they are damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.supervise import incident
from rlstable.supervise.incident import IncidentMemory, Incidents, limits_of, read, write

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


def incidents(caught: IncidentMemory | None = None, **fields: Any) -> tuple[Incidents, IncidentMemory]:
    own = IncidentMemory() if caught is None else caught
    config = tiny_config(guards={}, supervise={"incident": fields})
    return Incidents(Path("nowhere"), config, [], {}, own, lambda kind, **fields: None), own


def test_one_incident_per_window_is_saved() -> None:
    own, caught = incidents(window=10)
    assert own.wanted(5) and not own.opens_after(5)
    caught.count, caught.last = 1, 5
    assert [at for at in range(5, 30) if own.wanted(at)] == list(range(15, 30))
    assert [at for at in range(5, 30) if own.opens_after(at)] == [14]


def test_incident_limits_are_off_when_the_quarantine_is_off() -> None:
    limits = limits_of(tiny_config(guards={"quarantine": {"enabled": False}}))
    assert limits.max_abs_state is None and limits.max_other_norm is None
    assert limits_of(tiny_config(guards={})).max_abs_state == 1e10


def test_failure_to_save_an_incident_is_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Record:
        def take(self, _: Any) -> Any:
            return {"clock": np.zeros(1)}

        def __len__(self) -> int:
            return 1

    events: list[tuple[str, Any]] = []
    caught = IncidentMemory()
    own = Incidents(
        tmp_path, tiny_config(guards={}), [], {}, caught, lambda kind, **fields: events.append((kind, fields))
    )
    monkeypatch.setattr(incident, "write", lambda *_: None)
    own.write(incident.Slot(np.ones(1, bool), np.zeros(1, np.int32), Record()), 4, 6, {}, 8)
    assert [kind for kind, _ in events] == ["incident_failed"]
    assert caught == IncidentMemory(0, 6)  # the next attempt comes after the window
