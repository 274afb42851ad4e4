"""The table printed at the end of a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlstable.cli.sweep import SweepSummary


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
    summary = SweepSummary()
    summary.on_multirun_end(OmegaConf.create({"hydra": {"sweep": {"dir": str(folder)}}}))
    said = capsys.readouterr().out
    for words in ("supervise.recovery.remedies=[a,b]", "x=[/a]", "[bold]", "1,234", "5.2"):
        assert words in said
    assert SweepSummary.exit_codes == [0, 0, 1, 1]
    assert said.splitlines()[-1].endswith(f"sweep={folder}'")
