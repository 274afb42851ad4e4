"""Benchmarks of several parts: their time limit, their sittings and their failures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scripts import results, sittings
from scripts.bench import comparisons, seeds
from scripts.bench.parts import Parts, PartsRun
from scripts.pages import Section
from scripts.sittings import Sitting

CPU = {"platform": "cpu", "kind": "Some CPU", "cpus": 2}


class Clock:
    """A clock that measuring moves forward."""

    def __init__(self) -> None:
        self.time = 0.0
        self.measured: list[str] = []

    def measure(self, name: str, sitting: Sitting) -> list[dict[str, Any]]:
        if name == "broken":
            raise RuntimeError("out of memory\nand a long report")
        self.measured.append(name)
        self.time += 30.0
        return [{"name": name}]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(sittings, "now", lambda: own.time)
    return own


def made(clock: Clock, path: Path, *chosen: str) -> PartsRun:
    settings = {name: (f"env={name}",) for name in ("a", "b", "broken", "c")}

    def section(rows: list[dict[str, Any]]) -> Section:
        return Section("guards", "Guards", ("env",), [(row["name"],) for row in rows], [], rows)

    parts = Parts("guards", settings, chosen or [*settings], {"pairs": 2}, clock.measure, section)
    return PartsRun(parts, path, CPU, {"jax": "1"})


def test_part_that_does_not_fit_into_the_time_is_left_out(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    sitting = Sitting("1", 50.0)
    cells = [section.cells for section in made(clock, path, "a", "b", "c").run(sitting)]
    assert cells == [[("a",)], [("a",), ("b",)]]  # unknown durations start while there is time
    assert (clock.time, sitting.left_out) == (60.0, ["guards c"])
    assert [line["took"] for line in results.read(path)] == [30.0, 30.0]
    second = Sitting("2", 80.0)
    assert list(made(clock, path, "a", "b").run(second)) == []  # both took 30 s, and 20 s are left
    assert second.left_out == ["guards a", "guards b"]


def test_sitting_does_not_measure_a_part_twice(clock: Clock, tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    list(made(clock, path, "a", "b").run(Sitting("1")))
    run = made(clock, path, "a", "b", "c")
    assert run.missing("1") == ["c"] and run.missing("2") == ["a", "b", "c"]
    (section,) = run.run(Sitting("1"))
    assert section.cells == [("a",), ("b",), ("c",)]
    assert clock.measured == ["a", "b", "c"]
    list(made(clock, path, "a").run(Sitting("2")))
    assert [row["name"] for row in made(clock, path).rows(sitting="2")] == ["a"]
    assert [row["name"] for row in made(clock, path).rows()] == ["a", "b", "c"]


def test_failing_part_is_reported_and_the_others_are_measured(clock: Clock, tmp_path: Path) -> None:
    sitting = Sitting("1")
    list(made(clock, tmp_path / "bench.jsonl").run(sitting))
    assert clock.measured == ["a", "b", "c"]
    assert sitting.failed == ["guards broken: out of memory"]


def test_sitting_of_a_command_line_is_named_new_or_the_newest(clock: Clock) -> None:
    parser = argparse.ArgumentParser()
    sittings.add_arguments(parser)
    clock.time = 100.0
    continued = sittings.opened(parser.parse_args([]), "older")
    assert (continued.name, continued.remaining) == ("older", float("inf"))
    limited = sittings.opened(parser.parse_args(["--minutes", "2"]), "older")
    assert limited.name != "older" and limited.remaining == 120.0
    named = sittings.opened(parser.parse_args(["--minutes", "2", "--sitting", "mine"]), "older")
    assert (named.name, named.end) == ("mine", 220.0)
    assert sittings.opened(parser.parse_args([]), None).name > limited.name
    rows = [{"device": CPU, "sitting": "1"}, {"device": CPU}, {"device": {"kind": "Other"}, "sitting": "2"}]
    assert sittings.newest(rows, "Some CPU") == "1"
    assert sittings.newest(rows[1:], "Some CPU") is None


def test_no_further_pair_or_round_starts_when_the_time_is_used(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "device", lambda: CPU)
    rounds: list[int] = []

    def run(task: str, count: int, numbers: Any, *_: Any) -> dict[str, Any]:
        for number in numbers:
            rounds.append(number)
            clock.time += 20.0
        return {}

    monkeypatch.setattr(seeds, "run", run)
    args = argparse.Namespace(task=None, seeds=8, rounds=9)
    seeds.parts(args, Console(quiet=True)).measure("hopper", Sitting("1", 50.0))
    assert rounds == [0, 1, 2]
    pairs: list[int] = []

    def compare(comparison: Any, name: str, own: Any, numbers: Any, console: Any) -> dict[str, Any]:
        pairs.extend(numbers)
        return {}

    monkeypatch.setattr(comparisons, "compare", compare)
    args = argparse.Namespace(task=None, pairs=30)
    parts = comparisons.COMPARISONS[0].parts(args, Console(quiet=True))
    parts.measure("humanoid", Sitting("1", 50.0))
    assert pairs == [0, 1], "two pairs, even if the time is used"


@pytest.mark.parametrize(("platform", "chosen"), [("cpu", comparisons.SETTINGS), ("gpu", comparisons.ON_ACCELERATOR)])
def test_device_chooses_the_usual_settings(
    monkeypatch: pytest.MonkeyPatch, platform: str, chosen: dict[str, tuple[str, ...]]
) -> None:
    monkeypatch.setattr(results, "device", lambda: CPU | {"platform": platform})
    args = argparse.Namespace(task=None, pairs=30, seeds=8, rounds=1)
    assert comparisons.COMPARISONS[0].parts(args, Console(quiet=True)).chosen == [*chosen]
    usual = seeds.TASKS if platform == "cpu" else seeds.ON_ACCELERATOR
    assert seeds.parts(args, Console(quiet=True)).chosen == [*usual]
