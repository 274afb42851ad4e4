"""The table printed at the end of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from sweep_folders import add_result

from rlstable.report.sweep_summary import SweepSummary


def test_sweep_summary_shows_overrides_unchanged_and_survives_damaged_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a [bold] one"
    for number, override in enumerate(("supervise.recovery.remedies=[a,b]", "x=[/a]")):
        (folder / str(number)).mkdir(parents=True)
        result = {"stop_reason": "completed", "step": 1234, "return": 5.25, "overrides": [override]}
        (folder / str(number) / "result.json").write_text(json.dumps(result))
    for number, damaged in enumerate((b"\xff", b"[]"), 2):
        (folder / str(number)).mkdir()
        (folder / str(number) / "result.json").write_bytes(damaged)
    said = summary_of(folder, capsys)
    for words in ("supervise.recovery.remedies=[a,b]", "x=[/a]", "[bold]", "1,234", "5.2"):
        assert words in said
    assert SweepSummary.exit_codes == [0, 0, 1, 1]
    assert said.splitlines()[-1].endswith(f"sweep={folder}'")


def summary_of(sweep: Path, capsys: pytest.CaptureFixture[str]) -> str:
    SweepSummary().on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(sweep)}}}))
    return capsys.readouterr().out


def test_sweep_summary_ends_with_the_commands_that_train_the_best_setting_and_compare_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (rate, best) in enumerate((("1", 5.0), ("[2]", 7.0), ("3", None))):
        add_result(tmp_path / str(number), [f"a={rate}", "env=ant"], best, "completed" if best else "error")
    best, train, compare = summary_of(tmp_path, capsys).splitlines()[-3:]
    assert best == (
        "best setting  a=[2]: return 7.0. The seeds do not tell this setting from the next one, a=1: one seed is not "
        "enough."
    )
    assert train.startswith("train it      ") and train.endswith(" -m rlstable.train 'a=[2]' env=ant")
    assert compare.startswith("compare them  ") and compare.endswith(f"rlstable.report sweep={tmp_path}")


def test_sweep_summary_names_no_best_setting_if_a_run_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_result(tmp_path / "0", ["a=1"], 5.0)
    add_result(tmp_path / "1", ["a=2"], 7.0, "interrupted")
    said = summary_of(tmp_path, capsys)
    assert "No setting is the best: 1 of 2 runs have not run to their end." in said and "train it" not in said
