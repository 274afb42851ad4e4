"""Studies: the seeds that a cell lacks, rows of seeds whose training has ended, and failures."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlstable.config import ConfigError
from scripts import results, study
from scripts.process import Outcome
from scripts.study import Cell


def test_seeds_are_trained_from_the_first_one_without_a_row_on() -> None:
    cell = Cell("x", {"task": "x"}, range(4, 8), list)
    known = [{"task": task, "seed": seed} for task, seed in (("x", 4), ("x", 5), ("x", 7), ("y", 6))]
    assert study.missing(known, cell) == range(6, 8)
    assert not study.missing([{"task": "x", "seeds": list(range(8))}], cell)  # an older row, of all seeds


def test_rows_of_a_cell_that_fails_are_kept_and_the_other_seeds_trained_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "provenance", lambda: {"commit": "abc"})
    asked, fails, pages = Namespace(out=tmp_path / "x.jsonl", page=False), [True], []

    def train(seeds: range) -> Iterator[dict[str, Any]]:
        for seed in seeds:
            if seed == 1 and fails:
                raise ConfigError("exit code 1")
            yield {"seed": seed, "return": None if seed else 2.0}

    def run() -> None:
        study.run(asked, [Cell("cell", {"task": "x"}, range(2), train)], lambda rows, out: pages.append(len(rows)))

    with pytest.raises(SystemExit, match="1 cells failed"):
        run()
    fails.clear()
    run(), run()
    found = [{"task": "x", "seed": seed, "return": value, "commit": "abc"} for seed, value in ((0, 2.0), (1, None))]
    assert results.read(asked.out) == found and pages == [1, 2, 2]
    printed = capsys.readouterr()
    assert printed.err == "cell: exit code 1\n" and printed.out.count("nan (") == 1


def writes(monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    """Replaces the training by a process that writes this result of each seed, or none."""

    def watch(command: Sequence[str], env: Any) -> Outcome:
        words = dict(word.split("=", 1) for word in command[3:])
        first, count = int(words["seed"]), int(words["seeds"])
        for seed in range(first, first + count):
            path = Path(words["hydra.run.dir"], f"seed-{seed}" if count > 1 else "", "result.json")
            if result:
                results.add(path, [result])
        return Outcome(0.0, 1.0, 1.0, 3, None, "last words\n")

    monkeypatch.setattr(study, "watch", watch)


@pytest.mark.parametrize("seeds", [range(3, 4), range(3, 5)])
def test_trained_seeds_have_run_folders(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, {"stop_reason": "completed"})
    with study.trained(["env=ant"], seeds) as (runs, _):
        assert [run.seed for run in runs] == [*seeds] and runs[0].result == {"stop_reason": "completed"}
        rows = [{"step": 1}, {"step": 2, "eval/episode_reward": None}, {"step": 3, "eval/episode_reward": 4.0}]
        (runs[0].folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (runs[0].folder / "events.jsonl").write_text('{"kind": "rolled_back"}\n{"kind": "other"}\n')
        assert runs[0].curve() == {"steps": [2, 3], "returns": [None, 4.0]} and runs[0].events("rolled_back") == 1
    assert not runs[0].folder.exists()


@pytest.mark.parametrize("result", [None, {"stop_reason": "interrupted"}])
def test_seed_without_a_result_or_stopped_by_a_signal_is_an_error(result: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, result)
    with pytest.raises(ConfigError, match="exit code 3, last words"), study.trained([], range(2)):
        pass
