"""Logs of a long run stay bounded in size and keep what the report shows, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstable.io import jsonl, thinning
from rlstable.io.jsonl import JsonLines
from rlstable.io.thinning import History, thinned_events, thinned_rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thins logs from a hundred entries on."""
    for name, value in {"MOST": 100, "NEWEST": 10, "_SPACED": 20, "_STRETCHES": 5, "_LANES": 5}.items():
        monkeypatch.setattr(thinning, name, value)


def rows(count: int) -> list[dict[str, Any]]:
    noise = np.random.default_rng(0).normal(size=count)
    return [{"step": 64 * (n + 1), "training/v_loss": float(noise[n])} for n in range(count)]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("small")
def test_thinning_keeps_old_rows_evenly_spaced_and_all_of_the_newest() -> None:
    given = rows(110)
    kept = list(thinned_rows(lambda: iter(given)))
    assert kept[0] == given[0] and kept[-10:] == given[-10:]
    assert 30 <= len(kept) <= 10 + 21 + 5 * 4
    assert max(np.diff([row["step"] for row in kept])) <= 64 * 5


@pytest.mark.usefixtures("small")
def test_thinning_keeps_every_evaluation_and_every_spike() -> None:
    given = rows(110)
    for number in (33, 34, 35):
        given[number]["eval/episode_reward"] = None if number == 34 else 1.0
    given[51]["training/v_loss"], given[52]["training/v_loss"], given[53]["training/v_loss"] = 1e9, -1e9, float("nan")
    kept = list(thinned_rows(lambda: iter(given)))
    assert all(any(row is given[number] for row in kept) for number in (33, 34, 35, 51, 52))


@pytest.mark.usefixtures("small")
def test_thinning_adds_up_trips_and_keeps_other_events() -> None:
    events: list[dict[str, Any]] = []
    for n in range(1, 101):
        events.append(
            {"step": n, "time": 1.0, "kind": "guard_tripped", "guard": "quarantine", "reward": 2, "action": 1}
        )
        if n % 3 == 0:
            events.append({"step": n, "time": 1.0, "kind": "guard_tripped", "guard": "spike", "gradient": 1})
        if n % 10 == 0:
            events.append({"step": n, "time": 1.0, "kind": "rolled_back", "attempt": n})

    def total(found: list[dict[str, Any]], guard: str) -> int:
        own = [event for event in found if event.get("guard") == guard]
        return sum(event.get("reward", 0) + event.get("action", 0) + event.get("gradient", 0) for event in own)

    kept = list(thinned_events(lambda: iter(events)))
    assert len(kept) < 40
    assert [total(kept, guard) for guard in ("quarantine", "spike")] == [300, 33]
    assert [event["attempt"] for event in kept if event["kind"] == "rolled_back"] == list(range(10, 101, 10))
    assert kept[0]["step"] == 1 and kept[0]["added_up"] is True
    assert kept[-10:] == events[-10:]
    assert [event["step"] for event in kept] == sorted(event["step"] for event in kept)
    assert "added_up" not in events[0]
    again = list(thinned_events(lambda: iter(kept)))
    assert [total(again, guard) for guard in ("quarantine", "spike")] == [300, 33]


@pytest.mark.usefixtures("small")
def test_log_files_of_a_long_run_stay_bounded(tmp_path: Path) -> None:
    sink = JsonLines(tmp_path)
    for row in rows(2000):
        sink.log(row["step"], {"training/v_loss": row["training/v_loss"]})
        sink.event(row["step"], "guard_tripped", {"guard": "quarantine", "reward": 1})
    sink.close()
    metrics, events = read(tmp_path / "metrics.jsonl"), read(tmp_path / "events.jsonl")
    assert len(metrics) <= 120 and len(events) <= 100
    assert (metrics[0]["step"], metrics[-1]["step"]) == (64, 64 * 2000)
    assert sum(event["reward"] for event in events) == 2000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


@pytest.mark.usefixtures("small")
def test_rows_in_memory_stay_bounded() -> None:
    history: list[Any] = History()
    for row in rows(2000):
        history.append(row)
    assert len(history) <= 120
    assert history[0]["step"] == 64 and history[-1]["step"] == 64 * 2000


@pytest.mark.usefixtures("small")
def test_full_disk_while_thinning_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jsonl.os, "fsync", full)
    sink = JsonLines(tmp_path)
    for row in rows(150):
        sink.log(row["step"], {})
    monkeypatch.undo()
    sink.close()
    assert [row["step"] for row in read(tmp_path / "metrics.jsonl")] == [64 * n for n in range(1, 151)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


KILLED = """
import os, signal, sys
from rlstable.io import thinning
from rlstable.io import jsonl
thinning.MOST, thinning.NEWEST, thinning._SPACED, thinning._STRETCHES = 100, 10, 20, 5
replace = os.replace
def killed(*args):
    if {after}:
        replace(*args)
    os.kill(os.getpid(), signal.SIGKILL)
jsonl.os.replace = killed
sink = jsonl.JsonLines(sys.argv[1])
for n in range(1, 200):
    sink.log(64 * n, {{"training/v_loss": float(n % 7)}})
"""


@pytest.mark.parametrize("after", [False, True], ids=["before the new file takes its place", "after it"])
def test_kill_while_thinning_leaves_a_complete_log(tmp_path: Path, after: bool) -> None:
    folder = tmp_path / "run"
    ended = subprocess.run([sys.executable, "-c", KILLED.format(after=after), str(folder)], env=os.environ, check=False)
    assert ended.returncode == -signal.SIGKILL
    left = read(folder / "metrics.jsonl")
    assert (len(left) == 101) is not after
    assert [row["step"] for row in left][-10:] == [64 * n for n in range(92, 102)]
    sink = JsonLines(folder, resume_step=64 * 100)
    sink.log(64 * 101, {"training/v_loss": 3.0})
    sink.close()
    again = read(folder / "metrics.jsonl")
    assert again[:-1] == left[:-1]
    assert (again[-1]["step"], again[-1]["training/v_loss"]) == (64 * 101, 3.0)
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", "metrics.jsonl"]
