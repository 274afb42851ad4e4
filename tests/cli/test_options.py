"""Options shared by the commands: the run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rlstable.cli.command import options
from rlstable.cli.options import PolicyOptions
from rlstable.config import ConfigError
from rlstable.config.schema import Section
from rlstable.evaluate import EvaluateOptions
from rlstable.export.__main__ import ExportOptions
from rlstable.render.__main__ import RenderOptions
from rlstable.report.__main__ import ReportOptions

pytestmark = pytest.mark.usefixtures("here")


def make_run(folder: Path, time: float) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    os.utime(folder / "config.yaml", (time, time))


MODELS = [EvaluateOptions, RenderOptions, ExportOptions, ReportOptions]


@pytest.mark.parametrize("model", MODELS)
def test_newest_run_is_the_default_and_is_named_on_standard_error(
    model: type[Section], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(here / "runs" / "ant" / "1", 2)
    make_run(here / "runs" / "hopper" / "2", 1)
    found = options(model, ["run=latest"]).run  # type: ignore[attr-defined]
    assert found == (Path("runs/ant/1") if model is not ReportOptions else (Path("runs/ant/1"),))
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "run: runs/ant/1, the newest run\n")


def test_no_run_yet_is_one_line_that_says_how_to_make_one() -> None:
    with pytest.raises(ConfigError) as caught:
        options(PolicyOptions, [])
    assert str(caught.value) == (
        "run: there is no run in the folder runs yet; make one with rlstable train, or name a folder"
    )


def test_latest_of_several_seeds_is_the_best_seed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = here / "runs" / "ant" / "1"
    make_run(fleet, 1)
    for seed, best in ((0, 1.0), (1, 2.0)):
        (fleet / f"seed-{seed}" / "checkpoints" / "5").mkdir(parents=True)
        (fleet / f"seed-{seed}" / "result.json").write_text(json.dumps({"return": best}))
    assert options(PolicyOptions, []).run == Path("runs/ant/1/seed-1")
    assert capsys.readouterr().err == "run: runs/ant/1/seed-1, the best seed of the newest run\n"
    assert options(ReportOptions, []).run == (Path("runs/ant/1"),)
    assert options(PolicyOptions, ["run=runs/ant/1"]).run == Path("runs/ant/1")


def test_newest_sweep_is_reported_with_sweep_latest(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, time in (("a", 2), ("b", 1)):
        (here / "runs" / "sweeps" / name).mkdir(parents=True)
        os.utime(here / "runs" / "sweeps" / name, (time, time))
    found = options(ReportOptions, ["sweep=latest"])
    assert (found.run, found.sweep) == ((), Path("runs/sweeps/a"))
    assert capsys.readouterr().err == "sweep: runs/sweeps/a, the newest in runs/sweeps\n"
