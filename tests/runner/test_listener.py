"""Listeners hear of a run in its order; one that raises is named once and taken off, and training is the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from saved import events
from toys import assert_same, tiny_config

from rlstable import Listener
from rlstable.runner.loop import TrainingLoop

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")


class Heard(Listener):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def opened(self, run_dir: Path, seeds: Mapping[int, Any]) -> None:
        self.calls.append(("opened", run_dir.name, *seeds))

    def row(self, seed: int, step: int, row: dict[str, Any]) -> None:
        self.calls.append(("row", seed, step, "eval/episode_reward" in row))
        row.clear()  # its own copy

    def evaluated(self, seed: Any) -> None:
        self.calls.append(("evaluated", seed.config.seed, seed.host.step))

    def ended(self, folder: Path, fields: Mapping[str, Any]) -> None:
        self.calls.append(("ended", folder.name, fields["stop_reason"]))


class Raises(Heard):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        setattr(self, method, self._fail)

    def _fail(self, *arguments: Any) -> None:
        del arguments
        self.calls.append(("failed",))
        raise ZeroDivisionError("no\nroom")


def trained(folder: Path, *listeners: Listener, seeds: int = 1) -> TrainingLoop:
    config = tiny_config(seeds=seeds, total_steps=128, eval={"num_evals": 1}, logging={"console": "lines"}, devices=1)
    loop = TrainingLoop(config, folder, listeners=listeners)
    assert loop.run().stop_reason.name == "completed"
    return loop


def test_listener_hears_of_a_run_in_its_order(tmp_path: Path) -> None:
    trained(tmp_path / "run", heard := Heard())
    assert heard.calls == [
        ("opened", "run", 0), ("row", 0, 64, False), ("row", 0, 128, True), ("evaluated", 0, 128),
        ("ended", "run", "completed"),
    ]  # fmt: skip


def test_listener_hears_of_each_of_several_seeds_and_then_of_the_run(tmp_path: Path) -> None:
    trained(tmp_path / "run", heard := Heard(), seeds=2)
    assert heard.calls[0] == ("opened", "run", 0, 1)
    assert [call[1] for call in heard.calls if call[0] == "evaluated"] == [0, 1]
    assert [call[1] for call in heard.calls if call[0] == "ended"] == ["seed-0", "seed-1", "run"]


@pytest.mark.parametrize("method", ["opened", "row", "evaluated"])
def test_listener_that_raises_is_named_once_and_the_run_computes_the_same(tmp_path: Path, method: str) -> None:
    loop = trained(tmp_path / "run", bad := Raises(method), good := Heard())
    (event,) = events(tmp_path / "run", "listener_failed")
    assert (event["listener"], event["error"]) == ("Raises", "ZeroDivisionError: no room")
    assert bad.calls.count(("failed",)) == 1 and bad.calls[-1] == ("failed",)
    assert good.calls[-1] == ("ended", "run", "completed")
    assert_same(loop.single.state, trained(tmp_path / "other").single.state)


def test_listener_that_raises_at_the_end_is_named_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", Raises("ended"))
    assert "Raises failed: ZeroDivisionError: no room" in capsys.readouterr().out
