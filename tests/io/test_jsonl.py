"""Logs of a run are strict JSON with complete lines, also after a crash."""

from __future__ import annotations

import json
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rlstable.io.jsonl import JsonLines


def read(path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not strict JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    for line in lines:
        assert abs(line.pop("time") - time.time()) < 3600
    return lines


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
        5,
        "guard_tripped",
        {"kind": "x", "causes": {"physics": np.int32(2)}, "values": (1, -np.inf), "ok": True},
    )
    assert read(tmp_path / "run/metrics.jsonl") == [
        {"step": 2**40, "a": 1.5, "b": None, "c": None, "d": None, "e": 7, "step_": 3, "f": 2.0},
        {"step": 5},
    ]
    assert read(tmp_path / "run/events.jsonl") == [
        {
            "step": 5,
            "kind": "guard_tripped",
            "kind_": "x",
            "causes": {"physics": 2},
            "values": [1, None],
            "ok": True,
        }
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
