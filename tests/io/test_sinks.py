"""Sinks get all numbers and events, and a failing sink does not stop the run or other sinks."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from rlstable.config import ConfigError
from rlstable.io.sinks import JsonLines, Sinks, TensorBoard


def test_tensorboard_writes_finite_metrics_and_events(tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    sink = TensorBoard(tmp_path)
    sink.log(3, {"loss": 0.5, "bad": float("nan"), "none": None})
    sink.event(3, "resumed", {"iteration": 1})
    sink.close()
    sink.close()
    [path] = (tmp_path / "tensorboard").iterdir()
    events, data = [], path.read_bytes()
    while data:  # length, its checksum, record, its checksum
        length = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    values = [(event.step, value) for event in events for value in event.summary.value]
    assert [(step, value.tag) for step, value in values] == [(3, "loss"), (3, "events/resumed/text_summary")]
    assert values[0][1].simple_value == 0.5
    assert not caplog.records


def test_missing_tensorboard_is_an_error_with_the_command_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match=r"^logging\.tensorboard: .*pip install -e .*\[tensorboard\]"):
        TensorBoard(tmp_path)


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _take(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def log(self, step: int, metrics: Any) -> None:
        self._take("log", step, dict(metrics))

    def event(self, step: int, kind: str, fields: Any) -> None:
        self._take("event", step, kind, dict(fields))

    def close(self) -> None:
        self._take("close")


def test_all_sinks_get_all_rows_and_events():
    one, two = Recorder(), Recorder()
    sinks = Sinks([one, two])
    sinks.log(1, {"x": 1.0})
    sinks.event(1, "error", {"a": 1})
    sinks.close()
    sinks.close()
    sinks.log(2, {})
    assert one.calls == two.calls == [("log", 1, {"x": 1.0}), ("event", 1, "error", {"a": 1}), ("close",)]


def test_failing_sink_is_reported_once_and_dropped_after_three_failures_in_a_row():
    broken, good = Recorder(), Recorder()
    sinks = Sinks([broken, good])
    fields = {"sink": "Recorder", "error": "OSError: full"}
    for step, error in enumerate([OSError("full"), None, OSError("full"), OSError("full"), OSError("full"), None]):
        broken.error = error
        sinks.log(step, {})
    assert good.calls == [
        ("event", 0, "sink_failed", fields),
        *(("log", step, {}) for step in range(4)),
        ("event", 4, "sink_dropped", fields),
        ("log", 4, {}),
        ("log", 5, {}),
    ]
    assert broken.calls == [*(("log", step, {}) for step in range(5)), ("close",)]


def test_failure_of_all_sinks_is_a_warning():
    one, two = Recorder(), Recorder()
    one.error = two.error = ValueError("no")
    sinks = Sinks([one, two])
    with pytest.warns(RuntimeWarning, match="rlstable: sink_failed: Recorder: ValueError: no"):
        sinks.log(0, {})
    with pytest.warns(RuntimeWarning, match="sink_dropped"):
        for step in range(5):
            sinks.event(step, "error", {})
    sinks.close()
    alone = Recorder()
    sinks = Sinks([alone])
    alone.error = ValueError("late")
    with pytest.warns(RuntimeWarning, match="could not be closed: ValueError: late"):
        sinks.close()


def test_keyboard_interrupt_in_a_sink_is_raised():
    sink = Recorder()
    sink.error = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        Sinks([sink]).log(0, {})


def test_json_lines_are_never_dropped(tmp_path, monkeypatch):
    full = {"now": False}
    real = JsonLines.log

    def log(self: JsonLines, step: int, metrics: Any) -> None:
        if full["now"]:
            raise OSError(28, "No space left on device")
        real(self, step, metrics)

    monkeypatch.setattr(JsonLines, "log", log)
    other = Recorder()
    sinks = Sinks([JsonLines(tmp_path), other])
    for step in range(20):
        full["now"] = 3 <= step < 9 or step in (12, 15) or step >= 18
        sinks.log(step, {"x": step})
    sinks.close()
    rows = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2, 9, 10, 11, 13, 14, 16, 17]
    failed = {"sink": "JsonLines", "error": "OSError: [Errno 28] No space left on device"}
    assert [call for call in other.calls if call[0] == "event"] == [
        ("event", 3, "sink_failed", failed),
        ("event", 9, "sink_recovered", {"sink": "JsonLines", "lost": 6}),
        ("event", 12, "sink_failed", failed),  # again after a recovery; one or two lost lines are not reported
    ]
    [event] = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["lost"]) == ("sink_recovered", 6)
