"""The benchmark of several seeds at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rlstable.cli.compose import compose
from scripts import pages
from scripts.bench import __main__ as bench
from scripts.bench import seeds


@pytest.mark.parametrize("task", seeds.PARTS)
def test_seeds_together_and_alone_have_the_same_configuration(task: str) -> None:
    together = compose(seeds._together(task, 3))
    assert list(together.each_seed) == [0, 1, 2]
    for seed, overrides in enumerate(seeds._alone(task, 3)):
        assert compose(overrides) == together.of_seed(seed, "")


def test_rounds_alternate_and_the_first_only_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, started = [0.0], []

    def train(overrides: Sequence[str], folder: Path) -> None:
        several = any(word.startswith("seeds=") for word in overrides)
        started.append(overrides[-1])
        clock[0] += 30.0 if several else 10.0
        assert not folder.exists()

    monkeypatch.setattr(seeds.time, "perf_counter", lambda: clock[0])
    said: list[str] = []
    row = seeds.run("hopper", 4, range(3), said.append, train)
    one_by_one = [f"seed={seed}" for seed in range(4)]
    assert started == ["seeds=4", "seed=0", "seeds=4", *one_by_one, "seeds=4", *one_by_one]
    assert (row["together"], row["alone"]) == ([30.0, 30.0], [40.0, 40.0])
    assert said == ["hopper: 4 seeds in 30.0 s together, in 40.0 s one after another"] * 2
    section = seeds.section([row])
    assert section.cells == [("hopper", "4", "30.0", "40.0", "1.33", "1.33", "1.33")]
    page = pages.device_part(section, {"kind": "k", "platform": "p", "cpus": 1}, {})
    assert "| hopper | 4 | 30.0 | 40.0 | 1.33 | 1.33 | 1.33 |" in page


def test_failing_training_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2: .*env: unknown option 'nowhere'"):
        seeds.train(["env=nowhere"], tmp_path / "run")


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5"])
def test_invalid_rounds_are_a_one_line_error(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["seeds", f"--rounds={given}"])
    assert stopped.value.code == 2
    assert f"{given!r} must be a whole number, 1 or more" in capsys.readouterr().err
