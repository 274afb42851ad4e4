"""The benchmarks of a GPU, with stand-ins for the device, the clock and everything that measures."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from scripts import results, sittings
from scripts.bench import __main__ as bench
from scripts.bench import comparisons, gpu, kernels, scaling, seeds
from scripts.race import page as race_page
from scripts.race import race
from scripts.race.legs import Leg

GPU = {"platform": "gpu", "kind": "NVIDIA H100", "cpus": 16}
SPS = {"ours": 1000.0, "brax": 800.0, "rsl_rl": 1250.0}


class StandIn:
    """A GPU whose benchmarks take fixed seconds of a clock that is not real, and end at once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.page = folder / "benchmarks.md"
        self.clock = 0.0
        self.measured: list[str] = []
        self.started: list[tuple[str, float | None]] = []
        self.cut_at = ""  # measurement at which the machine is taken away
        self.broken: tuple[str, ...] = ()  # rivals that cannot be installed

    def take(self, what: str, seconds: float) -> None:
        if what == self.cut_at:
            raise KeyboardInterrupt
        self.measured.append(what)
        self.clock += seconds

    def install(self, rival: str, *_: Any) -> Path:
        if rival in self.broken:
            raise ConfigError(f"race: cannot make the environment of {rival}: no network")
        return Path("python")

    # The workshop of the race.
    def run(self, leg: Leg, seed: int) -> dict[str, Any]:
        self.take(f"{leg}, {seed}", 40.0)
        if leg.measure == "floor":
            return {"floor_sps": 2000.0, "physics_sps": 4000.0, "learner_sps": 4000.0, "gflops": 100.0}
        common = {"ending": "all steps", "ran": 40.0, "cpu": 1.0, "peak_mb": 500.0, "platform": "gpu"}
        if leg.measure == "threshold":
            seconds = {"ours": 60.0, "brax": 90.0}[leg.side]
            return common | {
                "seconds": seconds, "steps": 100, "evaluating": 1.0, "evaluations": 1, "curve": [(seconds, 100, 1.0)]
            }  # fmt: skip
        first = 10.0 if leg.warm else 30.0
        return common | {
            "imports": 2.0, "first": first, "steady_sps": SPS[leg.side], "learning_share": None,
            "above_imports_mb": 100.0, "iterations": 24,
        }  # fmt: skip

    def close(self) -> None:
        pass

    def compare(self, comparison: Any, name: str, own: Sequence[str], numbers: Iterable[int], *_: Any) -> Any:
        self.take(f"{comparison.name} {name}", 100.0)
        first, second = comparison.sides
        return {
            "env": name, "settings": list(own), "ratio": 0.98, "interval": [0.97, 0.99], f"sps_{first}": 1000.0,
            f"sps_{second}": 980.0, "pairs": len(list(numbers)), "steps": 10, "trips": {},
        }  # fmt: skip

    def profile(self, task: str, *_: Any) -> Any:
        self.take(f"kernels {task}", 60.0)
        learn = {"name": "gemm", "count": 20, "seconds": 0.002, "part": "learn"}
        return {"task": task, "times": {"collect": 10, "learn": 10, "rest": 1}, "kernels": [learn]}

    def seeds(self, task: str, count: int, rounds: Iterable[int], *_: Any) -> Any:
        self.take(f"seeds {task}", 200.0)
        assert list(rounds) == [0, 1]
        return {"task": task, "seeds": count, "together": [30.0], "alone": [90.0]}

    def point(self, point: scaling.Point, *_: Any) -> Any:
        self.take(f"scaling {point}", 30.0)
        rates = [100.0 + point.at] * 4
        ages = range(1, scaling.AGES + 1) if point.over == "done" else [point.at]
        return [{"task": point.task, "over": point.over, "at": at, "sps": rates} for at in ages]

    def start(self, words: Sequence[str], limit: float | None) -> int | None:
        """Runs a step in this process."""
        self.started.append((" ".join(word for word in words if not re.match("--(sit|out|res|min)", word)), limit))
        try:
            return bench.main(words)
        except SystemExit as error:
            assert isinstance(error.code, int)
            return error.code

    def gpu(self, *more: str) -> list[tuple[str, ...]]:
        """Runs the command; returns the cells of the table at the end."""
        self.measured.clear()
        self.started.clear()
        args = bench.make_parser().parse_args(["gpu", "--out", str(self.page), *more])
        with (self.folder / "table.txt").open("w") as file:
            console = Console(file=file, width=400)
            with contextlib.suppress(KeyboardInterrupt):
                gpu.run(args, self.prepare, console, self.start)
        self.lines = (self.folder / "table.txt").read_text().splitlines()
        rows = [tuple(cell.strip() for cell in line.split("│")[1:-1]) for line in self.lines if line.startswith("│")]
        return rows

    def prepare(self, words: Sequence[str]) -> Any:
        return bench.prepared(bench.make_parser().parse_args(words), Console(stderr=True))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    own = StandIn(tmp_path)
    monkeypatch.setattr(results, "device", lambda: GPU)
    monkeypatch.setattr(results, "commit", lambda: "abc1234")
    monkeypatch.setattr(sittings, "now", lambda: own.clock)
    monkeypatch.setattr(race, "python_of", own.install)
    monkeypatch.setattr(race, "Workshop", lambda *args: own)
    monkeypatch.setattr(comparisons, "compare", own.compare)
    monkeypatch.setattr(kernels, "run", own.profile)
    monkeypatch.setattr(seeds, "run", own.seeds)
    monkeypatch.setattr(scaling, "run", own.point)
    monkeypatch.setattr(scaling, "_draw", lambda *args: None)
    for name in ("draw_start", "draw_threshold"):
        monkeypatch.setattr(race_page, name, lambda *args: None)
    return own


STARTS = [
    (f"{task}, first iteration", side, value, ratio)
    for task in ("ant", "humanoid")
    for side, value, ratio in (
        ("rlstable, mjx", "30.0", ""), ("Brax PPO, mjx", "30.0", "1.00"), ("RSL-RL PPO, mjx", "30.0", "1.00"),
        ("rlstable, mjx, warm", "10.0", ""), ("Brax PPO, mjx, warm", "10.0", "1.00"),
    )
]  # fmt: skip
SPEEDS = [
    (f"{task}, steps/s", side, value, ratio)
    for task in ("ant", "humanoid")
    for side, value, ratio in (
        ("rlstable, mjx", "1,000", ""), ("Brax PPO, mjx", "800", "1.25"), ("RSL-RL PPO, mjx", "1,250", "0.80"),
    )
]  # fmt: skip
GOALS = [
    ("humanoid, 5,000", "rlstable", "60.0", ""), ("humanoid, 5,000", "rlstable, warm", "60.0", ""),
    ("ant, 1,500", "rlstable", "60.0", ""), ("ant, 1,500", "Brax PPO, published", "90.0", "1.50"),
    ("ant, 1,500", "rlstable, warm", "60.0", ""),
]  # fmt: skip
PAIRS = {
    name: [
        (f"{name}: {env}, published", side, f"{sps} steps/s", ratio)
        for env in ("ant", "humanoid")
        for side, sps, ratio in zip(sides, ("1,000", "980"), ("", "0.98"), strict=True)
    ]
    for name, sides in (("guards", ("off", "default")), ("supervision", ("off", "on")))
}
KERNELS = [
    (f"kernels: {task}, {part}", f"{count} kernels", f"{us} µs", "")
    for task in ("ant", "humanoid")
    for part, count, us in (("collect", 0, 0), ("learn", 2, 200), ("rest", 0, 0))
]
SEEDS = [
    line
    for task in ("inverted_pendulum", "ant, published")
    for line in (
        (f"seeds: {task}, 8 seeds", "one after another", "90.0 s", ""),
        (f"seeds: {task}, 8 seeds", "together", "30.0 s", "3.00"),
    )
]
SCALING = [
    ("scaling: ant, environments", "64 to 8,192", "164 to 8,292 steps/s", ""),
    ("scaling: ant, episode length", "125 to 8,000", "225 to 8,100 steps/s", ""),
    ("scaling: ant, steps done", "1 to 8", "100 to 100 steps/s", ""),
]
WHOLE = [*STARTS, *SPEEDS, *GOALS, *PAIRS["guards"], *KERNELS, *PAIRS["supervision"], *SEEDS, *SCALING]


def kinds(stand_in: StandIn) -> list[str]:
    """Kinds of measurements in their order, without repetitions."""
    return [key for key, _ in itertools.groupby(what.split()[0] for what in stand_in.measured)]


def test_gpu_measures_the_most_telling_first_and_fills_table_and_page(stand_in: StandIn) -> None:
    rows = stand_in.gpu("--minutes", "600")
    order = [
        "start",
        "floor",
        "start",
        "floor",
        "start",
        "guards",
        "kernels",
        "threshold",
        "supervision",
        "seeds",
        "scaling",
    ]
    assert kinds(stand_in)[: len(order)] == order
    assert stand_in.measured[:3] == [
        "start ant: ours (mjx), 1",
        "start ant: brax (mjx), 1",
        "start ant: rsl_rl (mjx), 1",
    ]
    assert sorted(rows) == sorted(WHOLE)
    assert rows[: len(STARTS)] == STARTS
    assert stand_in.lines[-1].startswith("└"), "nothing failed and nothing is left out"
    text = stand_in.page.read_text()
    sections = re.findall("<!-- bench: ([a-z-]+) -->", text)
    assert sections == [
        "race-start", "race-speed", "guards", "kernels", "race-threshold", "supervision", "seeds", "scaling"
    ]  # fmt: skip
    assert text.count("### NVIDIA H100\n") == len(sections)
    for line in (
        "| ant | rlstable, mjx | 1,000 [1,000, 1,000] | – | 0.50 [0.50, 0.50] |",
        "ant, steps/s: RSL-RL PPO, mjx 0.80; humanoid, steps/s: RSL-RL PPO, mjx 0.80.",
        "| ant, published | 0.980 | 0.970 – 0.990 | 1,000 | 980 |",
        "| ant, published | 8 | 30.0 | 90.0 | 3.00 | 3.00 | 3.00 |",
        "| ant, 1,500 | Brax PPO, published | 90.0 | 100 | 1.00 | 500 | 1 of 1 |",
        "| ant | environments | 64 | 8,192 | 164 8,292 | 164 | 8,292 |",
    ):
        assert line in text
    assert stand_in.gpu("--sitting", results.read(stand_in.folder / "race.jsonl")[0]["sitting"]) == rows
    assert stand_in.measured == []


def test_gpu_ends_in_time_and_reports_what_it_left_out(stand_in: StandIn) -> None:
    rows = stand_in.gpu("--minutes", "30")
    assert stand_in.clock == 1790.0
    assert stand_in.measured[-3:] == ["scaling ant, envs 512", "scaling ant, envs 1024", "start ant: brax (mjx), 2"]
    scaled = ("scaling: ant, environments", "64 to 1,024", "164 to 1,124 steps/s", "")
    assert sorted(rows) == sorted([*(row for row in WHOLE if row not in SCALING), scaled])
    assert stand_in.lines[-1].startswith("not measured: scaling ant, envs 2048; scaling ant, envs 4096; ")
    assert stand_in.lines[-1].count("race round 2") == 11 and stand_in.lines[-1].count("race round 3") == 12
    limits = [limit for _, limit in stand_in.started]
    assert limits == pytest.approx([1260.0, 528.0, 344.6, 636.4, 426.7, 436.4, 200.0, 50.0], abs=0.1)


def test_gpu_that_is_cut_off_shows_what_it_measured_and_continues_without_minutes(stand_in: StandIn) -> None:
    stand_in.cut_at = "kernels humanoid"
    rows = stand_in.gpu("--minutes", "600")
    done = [*stand_in.measured]
    assert rows == [*STARTS, *SPEEDS, *PAIRS["guards"], *KERNELS[:3]]
    assert "kernels humanoid; race round 1: threshold humanoid: ours" in stand_in.lines[-1]
    assert "| ant, published | 0.980 |" in stand_in.page.read_text()
    stand_in.cut_at = ""
    assert sorted(stand_in.gpu()) == sorted(WHOLE)
    assert stand_in.measured[0] == "kernels humanoid"
    assert not {*stand_in.measured} & {*done}
    assert {limit for _, limit in stand_in.started} == {None}
    assert len({row["sitting"] for row in results.read(stand_in.folder / "race.jsonl")}) == 1


def test_gpu_with_minutes_measures_everything_again(stand_in: StandIn) -> None:
    stand_in.gpu("--minutes", "600")
    first = [*stand_in.measured]
    stand_in.gpu("--minutes", "600")
    assert stand_in.measured == first


def test_failing_step_is_reported_and_the_others_are_measured(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.broken = ("rsl_rl",)

    def out_of_memory(task: str, *_: Any) -> Any:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand more")

    monkeypatch.setattr(kernels, "run", out_of_memory)
    rows = stand_in.gpu("--minutes", "600")
    assert sorted(rows) == sorted(row for row in WHOLE if row not in KERNELS and "RSL-RL" not in row[1])
    failed, left = stand_in.lines[-2:]
    assert failed == "failed: " + "; ".join(
        f"{step}: exit code 2, see above" for step in (gpu.PLAN[0], gpu.PLAN[2], gpu.PLAN[-1])
    )
    assert left.startswith("not measured: race round 1: start ant: rsl_rl (mjx); ")


def test_step_that_reaches_its_limit_is_left_out_and_no_failure(stand_in: StandIn) -> None:
    args = bench.make_parser().parse_args(["gpu", "--out", str(stand_in.page), "--minutes", "60"])
    started: list[str] = []

    def never_ends(words: Sequence[str], limit: float | None) -> None:
        assert limit is not None
        started.append(words[0])
        stand_in.clock += limit

    sitting = gpu.run(args, stand_in.prepare, Console(quiet=True), never_ends)
    assert started == [step.words[0] for step in gpu.PLAN[:-1]], "the last step but one took what was left"
    assert sitting.failed == [] and "kernels ant" in sitting.left_out
    assert stand_in.clock == pytest.approx(3600.0)


def test_gpu_without_a_gpu_is_one_line(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "device", lambda: GPU | {"platform": "cpu"})
    with pytest.raises(SystemExit) as stopped:
        bench.main(["gpu", "--out", str(stand_in.page)])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.err == "bench: gpu: jax finds no GPU here; nvidia-smi says whether there is a driver\n"
    assert captured.out == "" and not stand_in.page.exists()


def test_no_step_of_the_plan_has_a_setting_for_a_cpu(stand_in: StandIn) -> None:
    assert sum(step.share for step in gpu.PLAN) == 100
    for step in gpu.PLAN:
        args = bench.make_parser().parse_args([*step.words, "--out", str(stand_in.page)])
        if args.benchmark is race:
            continue  # test_legs_of_a_gpu_have_no_setting_for_a_cpu
        parts = args.benchmark.parts(args, Console(quiet=True))
        for name in parts.chosen:
            words = [word for word in parts.settings[name] if " " not in word]
            assert not {"env.backend=native", "env.backend=generalized"} & {*words}
            assert compose([*words, "recipe_for=accelerator"]).total_steps > 0


def test_step_is_a_process_that_reports_its_exit_code_and_ends_at_its_limit() -> None:
    assert gpu.start(["gards"], 600.0) == 2
    assert gpu.start(["gards"], 0.0) is None
