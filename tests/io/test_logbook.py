"""The logbook prints at once; files and services get the same rows and events later, as strict JSON and complete."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from saved import lines
from toys import tiny_config

from rlstable.io.console import Console
from rlstable.io.jsonl import JsonLines
from rlstable.io.logbook import Logbook

PATH = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


class Slow:
    """A service that answers when it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.took: list[tuple[Any, ...]] = []

    def log(self, step: int, metrics: Any) -> None:
        self.answers.wait()
        self.took.append((step, metrics))

    def event(self, step: int, kind: str, fields: Any) -> None:
        self.took.append((step, kind, fields))

    def close(self) -> None:
        self.took.append(("closed",))


class Broken(Slow):
    def log(self, step: int, metrics: Any) -> None:
        raise ConnectionError("no")


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(stream: io.StringIO) -> Console:
    return Console("lines", 1000, interval=0.0, stream=stream)


def test_training_does_not_wait_for_a_service_and_no_row_is_lost(
    tmp_path: Path, console: Console, stream: io.StringIO
) -> None:
    service = Slow()
    book = Logbook(tiny_config().logging, {}, tmp_path, console, [service])
    book.event(0, "early", {"a": 1})
    book.start(None, None)
    row, counts = {"x": 1.0}, np.array([1, 2])
    book.log(64, row)
    book.event(64, "rolled_back", {"counts": counts})
    row["x"], counts[:] = 9.0, 9  # the caller may change its arrays afterwards
    assert "step 64" in stream.getvalue()
    assert "rolled_back: counts" in stream.getvalue()
    book.wait()
    assert [(line["step"], line["x"]) for line in lines(tmp_path / "metrics.jsonl")] == [(64, 1.0)]
    found = [(line["kind"], line.get("counts")) for line in lines(tmp_path / "events.jsonl")]
    assert found == [("early", None), ("rolled_back", [1, 2])]
    assert service.took in ([], [(0, "early", {"a": 1})])
    service.answers.set()
    book.log(128, {"x": 2.0})
    book.close()  # what is left is written
    book.close()
    assert service.took == [
        (0, "early", {"a": 1}),
        (64, {"x": 1.0}),
        (64, "rolled_back", {"counts": [1, 2]}),
        (128, {"x": 2.0}),
        ("closed",),
    ]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [64, 128]
    book.log(192, {})
    book.event(192, "late", {})
    book.wait()
    assert service.took[-1] == ("closed",)
    assert "late" not in stream.getvalue()


def test_failing_service_is_logged_and_dropped(tmp_path: Path, console: Console) -> None:
    book = Logbook(tiny_config().logging, {}, tmp_path, console, [Broken()])
    book.start(None, None)
    for step in (64, 128, 192, 256):
        book.log(step, {})
    book.close()
    found = [(line["kind"], line["step"], line["sink"]) for line in lines(tmp_path / "events.jsonl")]
    assert found == [("sink_failed", 64, "Broken"), ("sink_dropped", 192, "Broken")]
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [64, 128, 192, 256]


def test_record_is_never_dropped(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    real = JsonLines.log

    def log(self: JsonLines, step: int, metrics: Any) -> None:
        if 3 <= step < 9 or step in (12, 15) or step >= 18:
            raise OSError(28, "No space left on device")
        real(self, step, metrics)

    monkeypatch.setattr(JsonLines, "log", log)
    service = Slow()
    service.answers.set()
    book = Logbook(tiny_config().logging, {}, tmp_path, console, [service])
    book.start(None, None)
    for step in range(20):
        book.log(step, {"x": step})
        book.wait()
    book.close()
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 9, 10, 11, 13, 14, 16, 17]
    failed = {"sink": "JsonLines", "error": "OSError: [Errno 28] No space left on device"}
    assert [took for took in service.took if len(took) == 3] == [
        (3, "sink_failed", failed),
        (9, "sink_recovered", {"sink": "JsonLines", "lost": 6}),
        (12, "sink_failed", failed),  # again after a recovery; one or two lost lines are not reported
    ]
    assert [(line["kind"], line["lost"]) for line in lines(tmp_path / "events.jsonl")] == [("sink_recovered", 6)]


def test_training_waits_for_a_stalled_service_only_when_the_queue_is_full(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlstable.io.logbook._MOST_QUEUED", 2)
    service = Slow()
    book = Logbook(tiny_config().logging, {}, tmp_path, console, [service])
    book.start(None, None)
    for step in (1, 2):
        book.log(step, {})
    third = threading.Thread(target=book.log, args=(3, {}))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    book.event(4, "rare", {})  # waits for no room
    service.answers.set()
    third.join()
    book.close()
    assert {took[0] for took in service.took} == {1, 2, 3, 4, "closed"}


def test_ending_process_writes_what_is_queued(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from saved import lines
from toys import tiny_config
book = Logbook(tiny_config().logging, {{}}, Path({str(tmp_path)!r}), Console("off", 1))
book.start(None, None)
book._parts[0].submit(lambda: time.sleep(0.3))
book.log(1, {{}})
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, env=os.environ | PATH).returncode == 3
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1]


# --- strict JSON


def read(path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not strict JSON")

    found = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    for line in found:
        assert abs(line.pop("time") - time.time()) < 3600
    return found


def test_json_lines_are_strict_and_written_at_once(tmp_path):
    (tmp_path / "run").mkdir()
    sink = JsonLines(tmp_path / "run")
    metrics = {
        "a": 1.5,
        "b": float("nan"),
        "c": np.float32(np.inf),
        "d": None,
        "e": np.int64(7),
        "step": 3,
        "f": jnp.float32(2),
    }
    sink.log(2**40, metrics)
    sink.log(np.int64(5), {})
    sink.event(
        5, "guard_tripped", {"kind": "x", "causes": {"physics": np.int32(2)}, "values": (1, -np.inf), "ok": True}
    )
    assert read(tmp_path / "run/metrics.jsonl") == [
        {"step": 2**40, "a": 1.5, "b": None, "c": None, "d": None, "e": 7, "step_": 3, "f": 2.0},
        {"step": 5},
    ]
    assert read(tmp_path / "run/events.jsonl") == [
        {"step": 5, "kind": "guard_tripped", "kind_": "x", "causes": {"physics": 2}, "values": [1, None], "ok": True}
    ]
    sink.close()
    sink.close()


def test_resume_drops_later_metrics_and_torn_lines_and_keeps_events(tmp_path):
    sink = JsonLines(tmp_path)
    for step in (10, 20, 30):
        sink.log(step, {"x": step})
        sink.event(step, "happened", {})
    sink.close()
    for name in ("metrics", "events"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 15, "ti')
    sink = JsonLines(tmp_path, resume_step=20)
    sink.log(25, {"x": 25})
    sink.event(25, "resumed", {})
    sink.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [10, 20, 25]
    assert [line["step"] for line in read(tmp_path / "events.jsonl")] == [10, 20, 30, 25]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "metrics.jsonl"]


def test_line_that_a_full_disk_cuts_is_removed(tmp_path):
    sink = JsonLines(tmp_path)
    file = sink._metrics._file

    class Full:
        closed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(file, name)

        def write(self, line: bytes) -> int:
            return file.write(line[:5])

    sink.log(1, {"a": 1.0})
    sink._metrics._file = Full()
    with pytest.raises(OSError, match="only a part of the line"):
        sink.log(2, {"a": 2.0})
    sink._metrics._file = file
    sink.log(3, {"a": 3.0})
    sink.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 3]
