"""Console lines of one seed among several."""

from __future__ import annotations

import io

import pytest

from rlstable.io.console import Console, SeedConsole


@pytest.fixture
def told() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console("plain", 1000, interval=0.0, stream=stream), stream


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_console_event_names_its_seed(told: tuple[Console, io.StringIO]) -> None:
    console, stream = told
    SeedConsole(console, 7).event(128, "rolled_back", {"cause": "storm"})
    assert lines(stream) == ["! step 128  rolled_back: of seed 7, cause storm"]


def test_console_of_one_seed_prints_neither_rows_nor_summaries(told: tuple[Console, io.StringIO]) -> None:
    console, stream = told
    own = SeedConsole(console, 0)
    own.log(64, {"eval/episode_reward": 1.0})
    own.summary([("stop reason", "completed")])
    own.close()
    assert lines(stream) == []
    own.message("result.json could not be written")
    own.event(64, "stopped", {"stop_reason": "completed", "exit_code": 0, "step": 64})
    assert lines(stream) == [
        "seed 0: result.json could not be written",
        "- step 64  stopped: of seed 0, stop_reason completed, exit_code 0",
    ]
