"""Weights & Biases and TensorBoard receive rows and events; an outage of the service never ends a run."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from saved import events
from toys import tiny_config

from rlstable.config import ConfigError
from rlstable.config.run import WandbConfig
from rlstable.io.console import Console
from rlstable.io.logbook import Logbook
from rlstable.io.services import TensorBoard, Wandb

ONLINE = WandbConfig(mode="online", project="p", group="g", tags=("a", "b"))


class FakeRun:
    id = "new-id"
    step = 0

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.failing = False
        self.calls = 0
        self.finished = 0

    def log(self, values: dict[str, Any], step: int) -> None:
        self.calls += 1
        if self.failing:
            raise ConnectionError("no\nnetwork")
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1
        if self.failing:
            raise ConnectionError("still none")


@pytest.fixture
def fake_wandb(monkeypatch):
    module: Any = types.ModuleType("wandb")
    module.run = FakeRun()
    module.init_args = {}

    class Settings(dict):
        model_fields = ("init_timeout", "finish_timeout")

        def __init__(self, **kwargs: Any) -> None:
            super().__init__(kwargs)

    def init(**kwargs: Any) -> FakeRun:
        module.init_args.update(kwargs)
        return module.run

    module.Settings, module.init = Settings, init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_configuration_and_can_be_resumed(tmp_path, fake_wandb):
    config = {"a": float("inf"), "b": (1, 2)}
    assert Wandb(ONLINE, tmp_path, config).run_id == "new-id"
    args = fake_wandb.init_args
    assert args["config"] == {"a": None, "b": [1, 2]}
    assert (args["mode"], args["project"], args["group"], args["tags"]) == ("online", "p", "g", ("a", "b"))
    assert (args["dir"], args["id"], args["resume"]) == (str(tmp_path), None, None)
    assert args["settings"]["init_timeout"] == args["settings"]["finish_timeout"] == 60
    fake_wandb.run.step = 500  # W&B remembers where the resumed run was
    sink = Wandb(ONLINE, tmp_path, {}, "old-id")
    assert (fake_wandb.init_args["id"], fake_wandb.init_args["resume"]) == ("old-id", "allow")
    sink.log(400, {"x": 1.0})
    assert fake_wandb.run.logged == [(500, {"x": 1.0})]


def test_wandb_steps_never_go_back(tmp_path, fake_wandb):
    sink = Wandb(ONLINE, tmp_path, {})
    sink.log(10, {"x": 1.0, "none": None})
    sink.log(4, {"x": 2.0})
    sink.event(3, "rollback", {"to": 4})
    sink.event(12, "rollback", {"to": 4})
    sink.log(11, {"only": None})
    sink.close()
    sink.close()
    sink.log(13, {"x": 3.0})
    assert fake_wandb.run.logged == [
        (10, {"x": 1.0}),
        (10, {"x": 2.0}),
        (10, {"events/rollback": 1}),
        (12, {"events/rollback": 2}),
    ]
    assert fake_wandb.run.finished == 1


def test_wandb_outage_at_the_start_is_reported_once_and_keeps_the_id(tmp_path, fake_wandb):
    def init(**_: Any) -> None:
        raise TimeoutError("no answer")

    fake_wandb.init = init
    own = tiny_config(logging={"wandb": {"mode": "online"}})
    book = Logbook(own.logging, own.model_dump(mode="json"), tmp_path, Console("off", 1))
    book.start("old-id", 64)
    book.log(128, {"x": 1.0})
    book.close()
    assert events(tmp_path) == [{"step": 64, "kind": "wandb_failed", "error": "TimeoutError: no answer"}]
    assert (book.wandb_run_id, book.wandb_url) == ("old-id", None)


def test_offline_wandb_writes_a_run_file(tmp_path, monkeypatch, capfd):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = Wandb(WandbConfig(mode="offline"), tmp_path, {"env": {"name": "ant"}})
    sink.log(2, {"x": 1.0, "none": None})
    sink.log(1, {"x": float("nan")})
    sink.event(1, "error", {"message": "x"})
    assert sink.run_id
    sink.close()
    assert capfd.readouterr() == ("", "")
    [run] = (tmp_path / "wandb").glob(f"offline-run-*-{sink.run_id}")
    assert (run / f"run-{sink.run_id}.wandb").stat().st_size > 0


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
