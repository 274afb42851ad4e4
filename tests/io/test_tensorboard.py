"""TensorBoard gets finite metrics and events."""

from __future__ import annotations

import sys

import pytest

from rlstable.config import ConfigError
from rlstable.io.services import TensorBoard


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
