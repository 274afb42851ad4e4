"""A sitting of the race: its order, its time limit, how it is continued, its page and the README's table."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import process, results, sittings
from scripts.bench import __main__ as bench
from scripts.race import legs as race_legs
from scripts.race import page as race_page
from scripts.race import race, readme, tasks
from scripts.race.legs import Leg

CPU = {"platform": "cpu", "kind": "Some CPU", "cpus": 2}
LEG = Leg("threshold", "inverted_pendulum", "ours", "", False, ("env=inverted_pendulum",), 600.0, 950.0)
GOALS = {"toy": tasks.Goal(950.0, {("sb3", ""): {"n": 1}, ("sbx", ""): {"n": 1}}, 600.0)}


def finished(seconds: float | None, ran: float = 30.0, **more: Any) -> dict[str, Any]:
    """Values that a threshold's leg measures."""
    ending = "time limit" if seconds is None else "reached"
    return {
        "ending": ending, "ran": ran, "cpu": 1.0, "peak_mb": 100.0, "platform": "cpu", "seconds": seconds,
        "steps": 10, "evaluating": 0.5, "evaluations": 1, "curve": [(1.0, 10, 960.0)], **more,
    }  # fmt: skip


class Race:
    """The command, with a clock and a workshop that are not real."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.clock = 0.0
        self.ran: list[str] = []
        self.leg: Callable[[Leg, int], tuple[float, dict[str, Any]]] = lambda leg, seed: (25.0, finished(20.0))

    def run(self, leg: Leg, seed: int) -> dict[str, Any]:
        self.ran.append(f"{seed} {leg.side}")
        seconds, row = self.leg(leg, seed)
        self.clock += seconds
        return row

    def close(self) -> None:
        self.ran.append("closed")

    def command(self, *more: str) -> list[dict[str, Any]]:
        """Runs the command; returns the rows of all sittings so far."""
        self.ran.clear()
        file = self.folder / "race.jsonl"
        paths = ["--results", str(file), "--out", str(self.page), "--readme", str(self.folder / "README.md")]
        assert bench.main(["race", *paths, *more]) == 0
        return results.read(file)

    @property
    def page(self) -> Path:
        return self.folder / "page.md"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    own = Race(tmp_path)
    monkeypatch.setattr(tasks, "START", {})
    monkeypatch.setattr(tasks, "THRESHOLD", GOALS)
    monkeypatch.setattr(tasks, "TASKS", tuple(GOALS))
    monkeypatch.setattr(results, "device", lambda: CPU)
    monkeypatch.setattr(race_page, "draw_threshold", lambda results, path: None)
    monkeypatch.setattr(race, "python_of", lambda *args: Path("python"))
    monkeypatch.setattr(race, "Workshop", lambda *args: own)
    monkeypatch.setattr(sittings, "now", lambda: own.clock)
    return own


def test_sitting_starts_no_leg_that_does_not_fit_into_its_minutes(
    fake: Race, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = fake.command("--minutes", "2")
    assert fake.ran == ["1 sb3", "1 sbx", "2 sbx", "2 sb3", "closed"]  # 20 s are left, and a leg takes 25 s
    assert {row["sitting"] for row in rows} == {rows[0]["sitting"]}
    assert [row["took"] for row in rows] == [25.0] * 4
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "left out for lack of time: round 3: threshold toy: sb3; round 3: threshold toy: sbx"


def test_duration_of_a_leg_is_known_from_an_older_sitting(fake: Race) -> None:
    fake.command("--minutes", "10", "--rounds", "1")
    fake.leg = lambda leg, seed: (5.0, finished(4.0))
    assert len(fake.command("--minutes", "0.4")) == 2
    assert fake.ran == ["closed"]


def test_race_without_minutes_continues_the_newest_sitting_and_with_minutes_starts_another(fake: Race) -> None:
    first = fake.command("--minutes", "1")
    assert len(first) == 2
    second = fake.command("--minutes", "1", "--rounds", "1")
    assert [row["sitting"] == first[0]["sitting"] for row in second] == [True, True, False, False]
    third = fake.command()
    assert fake.ran == ["2 sbx", "2 sb3", "3 sb3", "3 sbx", "closed"]
    assert {row["sitting"] for row in third[2:]} == {second[-1]["sitting"]}
    assert len(fake.command("--sitting", first[0]["sitting"], "--rounds", "2")) == len(third) + 2
    assert fake.ran == ["2 sbx", "2 sb3", "closed"]


def test_rows_from_before_sittings_are_on_the_page_until_a_sitting_begins(fake: Race) -> None:
    rows = fake.command("--rounds", "1")
    file = fake.folder / "race.jsonl"
    file.write_text("".join(json.dumps({k: v for k, v in row.items() if k != "sitting"}) + "\n" for row in rows))
    fake.command("--page")
    assert "| toy, 950 | SB3 PPO | 20.0 |" in fake.page.read_text()
    assert "One sitting" not in fake.page.read_text()
    fake.leg = lambda leg, seed: (25.0, finished(10.0))
    assert len(fake.command("--side", "sbx", "--rounds", "1")) == 3
    text = fake.page.read_text()
    assert "| toy, 950 | SBX PPO | 10.0 |" in text and "| SB3 PPO |" not in text
    assert f"One sitting, begun {results.read(file)[-1]['sitting'][:16]} UTC.\n" in text


def test_page_of_a_platform_has_one_sitting_and_other_platforms_stay(
    fake: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.command("--rounds", "1")
    for device in (CPU | {"kind": "Some GPU", "platform": "gpu"}, CPU | {"kind": "Other CPU"}):
        monkeypatch.setattr(results, "device", lambda device=device: device)
        fake.command("--minutes", "5", "--rounds", "1")
    text = fake.page.read_text()
    headings = [line.removeprefix("### ") for line in text.splitlines() if line.startswith("### ")]
    assert headings == ["Some GPU", "Other CPU"]
    assert "race-start" not in text, "a section without rows is not made"


def test_interrupted_sitting_keeps_its_rows_and_its_page(fake: Race) -> None:
    def interrupted(leg: Leg, seed: int) -> tuple[float, dict[str, Any]]:
        if seed == 2:
            raise KeyboardInterrupt
        return 25.0, finished(20.0)

    fake.leg = interrupted
    with pytest.raises(KeyboardInterrupt):
        fake.command("--minutes", "90")
    assert fake.ran == ["1 sb3", "1 sbx", "2 sbx", "closed"]
    assert len(results.read(fake.folder / "race.jsonl")) == 2
    assert fake.page.read_text().count("| 1 of 1 |") == 2


def test_failing_leg_is_reported_and_left_out_of_further_rounds(fake: Race, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(leg: Leg, seed: int) -> tuple[float, dict[str, Any]]:
        if leg.side == "sb3":
            raise ConfigError("race: sb3 ended with exit code 1")
        return 25.0, finished(20.0)

    fake.leg = failing
    with pytest.raises(SystemExit) as caught:
        fake.command()
    assert caught.value.code == 2
    assert fake.ran == ["1 sb3", "1 sbx", "2 sbx", "3 sbx", "closed"]
    assert capsys.readouterr().err.splitlines()[-1] == "bench: race: sb3 ended with exit code 1"
    assert "| SBX PPO | 20.0 [20.0, 20.0] |" in fake.page.read_text()


def test_side_that_cannot_be_installed_is_left_out(
    fake: Race, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def python_of(rival: str, *_: Any) -> Path:
        if rival == "sbx":
            raise ConfigError("race: cannot make the environment of sbx: no network")
        return Path("python")

    monkeypatch.setattr(race, "python_of", python_of)
    with pytest.raises(SystemExit):
        fake.command("--rounds", "1")
    assert fake.ran == ["1 sb3", "closed"]
    assert "bench: race: cannot make the environment of sbx: no network" in capsys.readouterr().err


def test_leg_that_is_stopped_before_it_measures_is_left_out_and_no_error(
    fake: Race, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(leg: Leg, seed: int) -> Any:
        fake.clock += 61.0
        raise race_legs.OutOfTime("race: floor was stopped after 61 s")

    fake.leg = killed
    assert fake.command("--minutes", "1", "--rounds", "1", "--side", "sb3") == []
    assert capsys.readouterr().out == "left out for lack of time: round 1: threshold toy: sb3\n"


def test_process_ends_with_the_sitting_and_its_row_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sb3_ppo.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(race_legs, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(race_legs, "python_of", lambda *args: sys.executable)
    left = iter((0.4,))
    row = race_legs.Workshop(tmp_path, False, lambda: next(left)).run(
        dataclasses.replace(LEG, side="sb3", settings={"episodes": 10}), 1
    )
    assert (row["ending"], row["limit"]) == ("time limit", 0.4)
    assert not tasks.is_whole(row, LEG.limit)
    assert tasks.is_whole(row, 0.4) and tasks.is_whole({"ending": "reached", "limit": 0.4}, LEG.limit)


def test_process_that_only_imports_prints_its_time_and_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.race.imports", "env=fast"]
    outcome = process.watch(command, process.environment(PYTHONPATH=str(process.ROOT)), tmp_path, 600.0)
    assert outcome.code == 0
    row = json.loads(outcome.last_line)
    assert row["imported_mb"] > 50 and row["time"] >= outcome.started


class Processes:
    """A workshop's processes that are all stopped at the limit, with the seconds of their limits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.limits: list[float] = []
        monkeypatch.setattr(race_legs, "watch", self.watch)
        monkeypatch.setattr(race_legs, "python_of", lambda *args: Path("python"))

    def watch(self, command: Any, env: Any, folder: Path, limit: float) -> process.Outcome:
        self.limits.append(limit)
        return process.Outcome(0.0, limit, 1.0, None, 100.0, "")


def test_leg_without_measurements_at_its_limit_is_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(monkeypatch)
    start = ("env=fast", "eval.num_evals=0")
    brax = dataclasses.replace(LEG, measure="start", side="brax", settings=start, threshold=None)
    for leg, message in (
        (dataclasses.replace(brax, side="floor", measure="floor"), "was stopped after 5 s"),
        (brax, "was not imported after 5 s"),
    ):
        with pytest.raises(race_legs.OutOfTime, match=message):
            race_legs.Workshop(Path("venvs"), False, lambda: 5.0).run(leg, 1)
    left = iter((5.0, 0.0))
    warm = dataclasses.replace(LEG, side="sbx", settings={"episodes": 10}, warm=True)
    workshop = race_legs.Workshop(Path("venvs"), False, lambda: next(left))
    with pytest.raises(race_legs.OutOfTime, match="no time is left after the run that compiles"):
        workshop.run(warm, 1)
    workshop.close()
    assert processes.limits == [5.0, 5.0, 5.0]


def test_readme_task_comes_first_with_all_its_rounds_then_starts_then_other_tasks() -> None:
    every = tasks.legs(on_cpu=True)
    order = [
        (number, leg.measure if leg.measure != "floor" else "start", leg.task) for number, leg in race.in_turn(every, 3)
    ]
    assert [key for key, _ in itertools.groupby(order)] == [
        *((number, "threshold", "inverted_pendulum") for number in (1, 2, 3)),
        *(
            (number, measure, task)
            for number in (1, 2, 3)
            for measure, names in (
                ("start", ("fast", "inverted_pendulum", "ant", "humanoid")),
                ("threshold", ("humanoid", "halfcheetah", "hopper", "ant")),
            )
            for task in names
        ),
    ]
    first = [leg for leg in every if (leg.measure, leg.task) == ("threshold", "inverted_pendulum")]
    cold = [("ours", ""), ("brax", ""), ("brax", "published"), ("sb3", ""), ("sbx", "")]
    warm = [("ours", ""), ("brax", ""), ("brax", "published"), ("sbx", "")]
    assert [(leg.side, leg.case) for leg in first if not leg.warm] == cold == list(readme.LABELS)
    assert [(leg.side, leg.case) for leg in first if leg.warm] == warm
    turns = [leg for _, leg in race.in_turn(first, 3)]
    assert [(leg.side, leg.case) for leg in turns[:: len(first)]] == cold[:3], "another side starts each round"


def test_legs_of_a_gpu_have_no_setting_for_a_cpu() -> None:
    for leg in tasks.legs(on_cpu=False):
        if leg.side in ("ours", "floor", "brax", "rsl_rl"):
            assert not {"env.backend=native", "recipe_for=cpu", "ppo.num_envs=256"} & {*leg.settings}, leg
            config = compose([*leg.settings, "recipe_for=accelerator"])
            assert config.total_steps >= config.env_steps_per_iteration


def leg_rows(*seconds: float | None) -> list[dict[str, Any]]:
    return [finished(value, limit=600.0) for value in seconds]


def test_medians_say_where_rlstable_is_behind() -> None:
    sb3, brax = (dataclasses.replace(LEG, side=side) for side in ("sb3", "brax"))
    warm = dataclasses.replace(LEG, warm=True)
    start = dataclasses.replace(LEG, measure="start", threshold=None, case="mjx")
    other = dataclasses.replace(start, side="brax")
    found: race_page.Results = [
        (LEG, leg_rows(10.0, 20.0, 30.0)), (sb3, leg_rows(10.0)), (brax, leg_rows(None)), (warm, leg_rows(5.0)),
        (start, [{"first": 10.0, "steady_sps": 100.0}]), (other, [{"first": 40.0, "steady_sps": 125.0}]),
    ]  # fmt: skip
    medians = [dataclasses.astuple(one) for name in race_page.NAMES for one in race_page.medians(found, name)]
    task = "inverted_pendulum"
    assert medians == [
        (f"{task}, first iteration", "rlstable, mjx", 10.0, None),
        (f"{task}, first iteration", "Brax PPO, mjx", 40.0, 4.0),
        (f"{task}, steps/s", "rlstable, mjx", 100.0, None),
        (f"{task}, steps/s", "Brax PPO, mjx", 125.0, 0.8),
        (f"{task}, 950", "rlstable", 20.0, None),
        (f"{task}, 950", "SB3 PPO", 10.0, 0.5),
        (f"{task}, 950", "Brax PPO", float("inf"), float("inf")),
        (f"{task}, 950", "rlstable, warm", 5.0, None),
    ]
    behind = [race_page.behind(race_page.medians(found, name)) for name in race_page.NAMES]
    assert behind == [
        "No other side is ahead of rlstable here.",
        f"rlstable is behind where its speed over the other side's is below 1: {task}, steps/s: Brax PPO, mjx 0.80.",
        f"rlstable is behind where its speed over the other side's is below 1: {task}, 950: SB3 PPO 0.50.",
    ]
    assert race_page.behind([]) == ""


SECONDS = {
    ("ours", "", False): (12.0, 11.0, 13.0), ("ours", "", True): (5.0,), ("brax", "", False): (36.0,),
    ("brax", "", True): (15.0,), ("brax", "published", False): (None,), ("sb3", "", False): (6.0,),
    ("sbx", "", False): (9.0,), ("sbx", "", True): (4.0,),
}  # fmt: skip
README = """Before.

<!-- what it costs -->

old table

<!-- end of what it costs -->

After.
"""
TABLE = """Before.

<!-- what it costs -->

Seconds from Enter to a return of 950 on the inverted pendulum, with imports, compiling and each side's evaluations.
Medians of up to 3 processes in turn, in one sitting on Some CPU with 2 CPUs, begun 2026-12-01.
Ratios are to rlstable; a blank cell was not measured. SB3 compiles nothing, so that it has no later start.
A ratio below 1 means that the side is faster: SB3 PPO, Gymnasium's pendulum 0.50 at the first start; \
SBX PPO, Gymnasium's pendulum 0.75 at the first start; SBX PPO, Gymnasium's pendulum 0.80 at the later start.
`make race MINUTES=90` measures this table, and [docs/benchmarks.md](docs/benchmarks.md) has the rest.

| side | first start | ratio | later start | ratio |
| --- | ---: | ---: | ---: | ---: |
| rlstable, 0.5 s of it evaluations | 12.0 s | 1.00 | 5.00 s | 1.00 |
| Brax PPO, our recipe, its cheapest physics, 0.5 s of it evaluations | 36.0 s | 3.00 | 15.0 s | 3.00 |
| Brax PPO, published settings, 0.5 s of it evaluations | > 600 s |  |  |  |
| SB3 PPO, Gymnasium's pendulum, 0.5 s of it evaluations | 6.00 s | 0.50 |  |  |
| SBX PPO, Gymnasium's pendulum, 0.5 s of it evaluations | 9.00 s | 0.75 | 4.00 s | 0.80 |

<!-- end of what it costs -->

After.
"""


def pendulum_rows(sitting: str | None) -> list[dict[str, Any]]:
    common = {"measure": "threshold", "task": "inverted_pendulum", "sitting": sitting, "device": CPU}
    return [
        {**common, "side": side, "case": case, "warm": warm, "round": number} | finished(value, 600.0, limit=600.0)
        for (side, case, warm), several in SECONDS.items()
        for number, value in enumerate(several, 1)
    ]


def test_table_of_the_readme_is_of_the_newest_sitting_that_has_every_side(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(README)
    newer = [row for row in pendulum_rows("2026-12-09T10:00:00") if row["side"] != "sb3"]
    cut = finished(None, 3.0, limit=3.0)  # the sitting ended
    torn = {**newer[0], "side": "sb3"} | cut
    rows = [*pendulum_rows("2026-12-01T10:00:00"), *newer, torn]
    readme.write(path, rows)
    assert path.read_text() == TABLE
    readme.write(path, rows)
    assert path.read_text() == TABLE


@pytest.mark.parametrize(("text", "sitting"), [(README, None), ("No markers.\n", "2026-12-01T10:00:00")])
def test_readme_without_markers_or_without_a_sitting_stays(tmp_path: Path, text: str, sitting: str | None) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    readme.write(path, pendulum_rows(sitting))
    assert path.read_text() == text
    readme.write(tmp_path / "missing.md", pendulum_rows("2026-12-01T10:00:00"))
    assert not (tmp_path / "missing.md").exists()


def test_readme_of_the_repository_has_the_markers() -> None:
    text = (process.ROOT / "README.md").read_text()
    assert text.count(f"<!-- {readme.MARKER} -->") == text.count(f"<!-- end of {readme.MARKER} -->") == 1


@pytest.mark.parametrize("given", ["0", "-1", "nan", "an hour"])
def test_invalid_minutes_are_a_one_line_error(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["race", f"--minutes={given}"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"bench: argument --minutes: {given!r} must be a number of minutes, more than 0\n"
