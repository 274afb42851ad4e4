"""Studies: the seeds that a cell lacks, rows of seeds whose training has ended, and failures."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlstable.config import ConfigError
from scripts import results, study
from scripts.process import Outcome
from scripts.study import Cell


def row(seed: int, value: float | None = 1.0) -> dict[str, Any]:
    return {"task": "x", "seed": seed, "return": value}


def test_seeds_are_trained_from_the_first_one_without_a_row_on() -> None:
    cell = Cell("x", {"task": "x"}, range(4, 8), list)
    known = [row(4), row(5), row(7), {**row(6), "task": "y"}]
    assert study.missing(known, cell) == range(6, 8)
    assert not study.missing([{"task": "x", "seeds": list(range(8))}], cell)  # all seeds of an older row


def test_study_keeps_the_rows_of_a_cell_that_fails_and_trains_the_rest_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "provenance", lambda: {"commit": "abc"})
    asked, fails, pages = Namespace(out=tmp_path / "x.jsonl", page=False), [True], []

    def train(seeds: range) -> Iterator[dict[str, Any]]:
        for seed in seeds:
            if seed == 1 and fails:
                raise ConfigError("exit code 1")
            yield {"seed": seed, "return": None if seed else 2.0}

    cells = [Cell("cell", {"task": "x"}, range(2), train)]
    with pytest.raises(SystemExit, match="1 cells failed"):
        study.run(asked, cells, lambda rows, out: pages.append(len(rows)))
    fails.clear()
    for _ in range(2):
        study.run(asked, cells, lambda rows, out: pages.append(len(rows)))
    assert results.read(asked.out) == [{**row(0, 2.0), "commit": "abc"}, {**row(1, None), "commit": "abc"}]
    printed = capsys.readouterr()
    assert pages == [1, 2, 2] and printed.err == "cell: exit code 1\n" and printed.out.count("nan (") == 1


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the training process by one that writes these results; keeps its command."""
    about: dict[str, Any] = {"result": {"stop_reason": "completed"}}

    def watch(command: Sequence[str], env: Mapping[str, str]) -> Outcome:
        about["command"] = command
        words = dict(word.split("=", 1) for word in command[3:])
        for seed in range(int(words["seeds"])):
            name = f"seed-{seed + int(words['seed'])}" if int(words["seeds"]) > 1 else ""
            folder = Path(words["hydra.run.dir"], name)
            folder.mkdir(parents=True)
            if about["result"]:
                (folder / "result.json").write_text(json.dumps(about["result"]))
        return Outcome(0.0, 1.0, 1.0, 3, None, "last words\n")

    monkeypatch.setattr(study, "watch", watch)
    return about


@pytest.mark.parametrize("seeds", [range(3, 4), range(3, 5)])
def test_trained_seeds_have_run_folders(process: dict[str, Any], seeds: range) -> None:
    with study.trained(["env=ant"], seeds) as (runs, done):
        assert [run.seed for run in runs] == [*seeds] and done.code == 3
        (run, *_) = runs
        rows = [{"step": 1}, {"step": 2, "eval/episode_reward": None}, {"step": 3, "eval/episode_reward": 4.0}]
        results.add(run.folder / "metrics.jsonl", rows)
        results.add(run.folder / "events.jsonl", [{"kind": "rolled_back"}, {"kind": "other"}])
        assert run.curve() == {"steps": [2, 3], "returns": [None, 4.0]}
        assert (run.events("rolled_back"), run.result["stop_reason"]) == (1, "completed")
    assert process["command"][3] == "env=ant" and not run.folder.exists()


@pytest.mark.parametrize("result", [None, {"stop_reason": "interrupted"}])
def test_seed_without_a_result_or_stopped_by_a_signal_is_an_error(process: dict[str, Any], result: Any) -> None:
    process["result"] = result
    with pytest.raises(ConfigError, match="exit code 3, last words"), study.trained([], range(2)):
        pass
