"""The benchmarks: statistics, order of calls, page, command line, and one tiny run."""

from __future__ import annotations

import itertools
import json
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlstable.cli.compose import compose
from rlstable.device import machine
from scripts import pages, results
from scripts.bench import __main__ as bench
from scripts.bench import comparisons
from scripts.bench.comparisons import median_and_interval
from scripts.bench.side import QUIET, Side

SECTION = pages.Section("guards", "Cost of the guards", ("env", "speed"), [("ant", "0.99")], ["`env=ant`"], [])
MARKERS = (pages.BEGIN, pages.END)
TOY = (
    "env=import", "ppo=default", "env.name=toys:PointMass", "env.episode_length=12",
    "ppo.num_envs=8", "ppo.batch_size=8", "ppo.num_minibatches=2", "ppo.num_updates_per_batch=2", "ppo.unroll_length=4",
    "network.policy_hidden_layer_sizes=[8]", "network.value_hidden_layer_sizes=[8]",
)  # fmt: skip


def exact_interval(count: int) -> tuple[int, int]:
    """2.5 % and 97.5 % of the bootstrap median of 1..count, count odd, from the binomial distribution.

    The median of a resample is at most k where more than half of its draws are, each with probability k / count.
    """

    def at_most(k: int) -> float:
        share, half = k / count, count // 2 + 1
        return sum(math.comb(count, n) * share**n * (1 - share) ** (count - n) for n in range(half, count + 1))

    low, high = (next(k for k in range(1, count + 1) if at_most(k) >= level) for level in (0.025, 0.975))
    return low, high


@pytest.mark.parametrize("count", [5, 31, 101])
def test_interval_is_that_of_the_bootstrap_distribution(count: int) -> None:
    values = np.random.default_rng(1).permutation(np.arange(1.0, count + 1))
    median, low, high = median_and_interval(values)
    assert median == (count + 1) / 2
    assert (low, high) == exact_interval(count)


def test_interval_is_deterministic_and_scales_with_its_values() -> None:
    values = np.array([0.9, 1.1, 0.97, 1.0])
    assert median_and_interval(values) == median_and_interval(values)
    assert median_and_interval(values)[0] == pytest.approx(0.985)
    assert median_and_interval(2 * values) == pytest.approx(2 * np.array(median_and_interval(values)))
    assert median_and_interval(np.full(3, 0.5)) == (0.5, 0.5, 0.5)


def test_timed_pairs_alternate_after_the_warm_up() -> None:
    calls: list[str] = []
    clock = itertools.count()

    def side(name: str) -> Any:
        return lambda: (calls.append(name), float(next(clock)))[1]

    a, b = comparisons.time_in_turn(side("a"), side("b"), range(3))
    assert "".join(calls) == comparisons.WARM_UP * "ab" + "ab" + "ba" + "ab"
    first = 2.0 * comparisons.WARM_UP
    assert a.tolist() == [first, first + 3, first + 4]
    assert b.tolist() == [first + 1, first + 2, first + 5]


def test_new_page_has_title_and_section_and_updating_it_again_changes_nothing() -> None:
    page = pages.updated("", SECTION, "cpu", "numbers\n")
    assert page.startswith("# Benchmarks\n")
    assert "## Cost of the guards\n\n<!-- bench: guards on cpu -->\nnumbers\n" in page
    assert pages.updated(page, SECTION, "cpu", "numbers\n") == page


def test_update_of_a_page_keeps_other_devices_sections_and_text() -> None:
    gpu = "NVIDIA H100 80GB HBM3 (a+b)"
    other = pages.Section("precision", "Cost of precision", (), [], [], [])
    page = pages.updated("# Mine\n\nWritten by hand.", SECTION, "cpu", "first\n")
    page = pages.updated(page, other, "cpu", "second\n")
    page = pages.updated(page, SECTION, gpu, "third\n") + "\nAn afterword.\n"
    page = page.replace("## Cost of the guards\n", "## Cost of the guards\n\nHow to read it.\n")
    changed = pages.updated(page, SECTION, "cpu", "FIRST \\1\n")
    assert changed == page.replace("first\n", "FIRST \\1\n")
    for kept in (
        "# Mine\n\nWritten by hand.\n",
        "## Cost of the guards\n\nHow to read it.\n",
        "## Cost of precision",
        "second\n",
        f"on {gpu} -->\nthird\n",
        "\nAn aft",
    ):
        assert kept in changed
    assert changed.count("## Cost of the guards") == 1


@pytest.mark.parametrize("lost", [marker.format(name) for marker in MARKERS for name in ("guards", "guards on cpu")])
def test_page_without_a_marker_is_not_changed(lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = pages.updated("", SECTION, "cpu", "numbers\n")
    file = tmp_path / "page.md"
    file.write_text(page.replace(lost, "", 1))
    assert complaint(capsys, "guards", "--out", str(file)).startswith("bench: --out: ")
    assert file.read_text() == page.replace(lost, "", 1)


def complaint(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line that a mistake prints, with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        bench.main(args)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


BAD_INPUT = {
    "one pair": (["guards", "--pairs", "1"], "argument --pairs: '1' must be a whole number, 2 or more"),
    "no number": (["guards", "--pairs", "many"], "argument --pairs: 'many' must be"),
    "a negative number": (["guards", "--pairs=-3"], "argument --pairs: '-3' must be"),
    "unknown environment": (["guards", "--env", "humanoyd"], "argument --env: invalid choice: 'humanoyd'"),
    "unknown benchmark": (["gards"], "argument benchmark: invalid choice: 'gards'"),
    "no benchmark": ([], "the following arguments are required: benchmark"),
    "no such folder": (["guards", "--out", "nowhere/page.md"], "--out: there is no folder nowhere"),
    "a folder for a page": (["guards", "--out", "."], "--out: cannot read ."),
}


@pytest.mark.parametrize(("args", "message"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bench_command_reports_a_mistake_in_one_line_with_exit_code_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complaint(capsys, *args).startswith(f"bench: {message}")


def test_invalid_setting_of_a_benchmark_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(comparisons.SETTINGS, "toy", (*TOY, "ppo.lerning_rate=1"))
    with pytest.raises(SystemExit) as caught:
        bench.main(["guards", "--env", "toy", "--json", "--out", str(tmp_path / "page.md")])
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("bench: guards toy: ppo.lerning_rate: unknown key")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
def test_benchmark_of_the_guards_measures_a_tiny_run_and_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = []

    class Recorded(Side):
        def __init__(self, overrides: list[str], folder: Path):
            super().__init__(overrides, folder)
            sides.append((overrides[-1], self))

    monkeypatch.setattr(comparisons.side, "Side", Recorded)
    monkeypatch.setitem(comparisons.SETTINGS, "toy", TOY)
    page = tmp_path / "page.md"
    assert bench.main(["guards", "--env", "toy", "--env", "toy", "--pairs", "3", "--json", "--out", str(page)]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    assert result["versions"].keys() == {"python", "jax", "brax", "mujoco", "mjx", "rlstable"}
    assert result["device"].keys() == {"platform", "kind", "cpus"}
    (row,) = result["rows"]
    off, default = np.array(row["seconds_off"]), np.array(row["seconds_default"])
    assert off.shape == default.shape == (3,)
    assert row["ratio"] == pytest.approx(np.median(off / default), rel=1e-2)  # times are printed in microseconds
    assert row["interval"][0] <= row["ratio"] <= row["interval"][1]
    assert row["sps_off"] == pytest.approx(64 / np.median(off), rel=1e-2)
    assert row["trips"] == {}

    (first, plain), (second, guarded) = sides
    assert (first, second) == ("guards=off", "guards=default")
    for side, has_guards in ((plain, False), (guarded, True)):
        counters = side._loop.single.state.counters
        assert bool(counters.trips) is has_guards
        assert int(counters.iterations) == 1 + comparisons.WARM_UP + 3, "the state is carried from call to call"
        assert not side._loop.run_dir.exists(), "nothing is left of the runs"

    text = page.read_text()
    assert f"### {machine.name()}" in text
    assert f"| toy | {row['ratio']:.3f} |" in text
    assert "| steps/s off | steps/s default |" in text
    assert "env.name=toys:PointMass" in text
    assert str(Path.home()) not in text
    assert "Cost of the guards" in captured.err


def test_benchmark_of_one_task_keeps_the_others_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A benchmark that was stopped keeps the parts that it had measured."""
    device, numbers = {"platform": "cpu", "kind": "Slow CPU", "cpus": 2}, itertools.count(1)

    def measure(task: str, *_: Any) -> dict[str, Any]:
        if task == "humanoid":
            raise KeyboardInterrupt
        return {"task": task, "seeds": 8, "together": [1.0], "alone": [float(next(numbers))]}

    monkeypatch.setattr(results, "device", lambda: device)
    monkeypatch.setattr(bench.seeds, "run", measure)
    page = tmp_path / "page.md"

    def sooner() -> dict[str, str]:
        lines = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
        return {line[0]: line[4] for line in lines[1:] if line[0] != "---"}

    with pytest.raises(KeyboardInterrupt):
        bench.main(["seeds", "--out", str(page)])
    assert sooner() == {"inverted_pendulum": "1.00", "hopper": "2.00"}
    assert bench.main(["seeds", "--task", "inverted_pendulum", "--out", str(page)]) == 0
    assert sooner() == {"inverted_pendulum": "3.00", "hopper": "2.00"}
    # Results of other versions, devices or settings are kept apart.
    monkeypatch.setattr(bench, "versions", lambda: {"jax": "9"})
    assert bench.main(["seeds", "--task", "hopper", "--out", str(page)]) == 0
    assert sooner() == {"hopper": "4.00"}
    device["kind"] = "Other CPU"
    assert bench.main(["seeds", "--task", "hopper", "--out", str(page)]) == 0
    assert page.read_text().count("| hopper |") == 2
    capsys.readouterr()
    (tmp_path / "bench.jsonl").write_text("{")
    assert "bench.jsonl: Expecting property name" in complaint(capsys, "seeds", "--out", str(page))


@pytest.mark.parametrize("comparison", comparisons.COMPARISONS, ids=lambda comparison: comparison.name)
def test_both_sides_of_every_comparison_are_different_configurations(comparison: Any) -> None:
    first, second = (compose([*comparisons.COMMON, *QUIET, *side.split()]) for side in comparison.sides.values())
    assert first != second


def test_table_in_80_columns_does_not_break_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    header = ("env", "relative\nspeed", "95 % interval", "steps/s\noff", "steps/s\ndefault")
    cells = [("inverted_pendulum", "0.991", "0.981 – 0.998", "1,025,384", "1,019,902")]
    section = pages.Section("guards", "Cost", header, cells, [], [])
    bench.show(section, bench.Console(width=80))
    printed = capsys.readouterr().out
    for cell in cells[0]:
        assert f" {cell} " in printed


def test_bench_command_has_the_documented_defaults() -> None:
    args = bench.make_parser().parse_args(["guards"])
    assert (args.pairs, args.out, args.task, args.json) == (30, Path("docs/benchmarks.md"), None, False)


def test_stop_ends_the_command_and_later_signals_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[Any, Any] = {}
    monkeypatch.setattr(bench.signal, "signal", handlers.__setitem__)
    with pytest.raises(KeyboardInterrupt):
        bench.stop(signal.SIGTERM, None)
    assert handlers == {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_IGN}
