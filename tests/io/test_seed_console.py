"""Console lines of one seed among several."""

from __future__ import annotations

import io

import pytest

from rlstable.io.console import Console, SeedConsole


@pytest.fixture
def told() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console("plain", 1000, "two seeds", interval=0.0, stream=stream), stream


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()[1:]  # without the title


def test_console_event_names_its_seed(told: tuple[Console, io.StringIO]) -> None:
    console, stream = told
    SeedConsole(console, 7, set()).event(128, "rolled_back", {"cause": "storm"})
    assert lines(stream) == ["! step 128  rolled_back: of seed 7, cause storm"]


def test_console_prints_an_event_of_all_seeds_once(told: tuple[Console, io.StringIO]) -> None:
    console, stream = told
    of_all: set[str] = set()
    for step in (0, 64):
        for seed in (4, 5, 6):
            SeedConsole(console, seed, of_all).event(step, "memory_planned", {"plan": "envs_per_pass 8"})
    assert lines(stream) == [f"! step {step}  memory_planned: plan envs_per_pass 8" for step in (0, 64)]


def test_console_of_one_seed_prints_neither_rows_nor_summaries(told: tuple[Console, io.StringIO]) -> None:
    console, stream = told
    own = SeedConsole(console, 0, set())
    own.log(64, {"eval/episode_reward": 1.0})
    own.summary([("stop reason", "completed")])
    own.event(64, "stopped", {"stop_reason": "completed"})
    own.close()
    assert lines(stream) == []
    own.message("result.json could not be written")
    assert lines(stream) == ["seed 0: result.json could not be written"]
