"""Mistakes in the arguments of the commands that read a run are one line with exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from commands import exit_code
from short_runs import trained

from rlstable.evaluate import main as evaluate
from rlstable.export.__main__ import main as export
from rlstable.render.__main__ import main as render
from rlstable.replay.__main__ import main as replay
from rlstable.report.__main__ import main as report

ARM = Path(__file__).parents[1] / "robot" / "models" / "arm.xml"
MISSING = "run: no/such is not a run folder, it has no config.yaml; runs are in runs/<env>/<time>"
MISTAKES = [
    (evaluate, "run=no/such", MISSING),
    (evaluate, "run={empty}", "is not a run folder, it has no config.yaml"),
    (evaluate, "run={run} which=7", "no checkpoint 7 here"),
    (evaluate, "run={run} which=worst", "which: input should be 'best' or 'latest'"),
    (evaluate, "run={run} episodes=none", "episodes: 'none' must be a number, not text"),
    (export, "run={run} format=torch", "format: input should be 'both', 'onnx' or 'stablehlo', got 'torch'"),
    (export, "run={run} out=/proc/no", "/proc/no: No such file or directory"),
    (render, "run={run}", "run: toys:PointMass has no MuJoCo model to draw"),
    (render, "run={run} width=333", "width: input should be a multiple of 2, got 333"),
    (render, "env=robot_reach", "rlstable: env.xml: is missing"),
    (render, f"env=robot_reach env.xml={ARM} episodes=0", "rlstable: episodes: "),
    (render, f"env=robot_reach env.xml={ARM} which=best", "rlstable: which: "),
    (replay, "{empty}", "{empty}: is no incident, it has no incident.json; use a folder runs/.../incidents/<name>"),
    (report, "run={run} sweep={run}", "run: cannot be combined with sweep; leave one of them out"),
    (report, "sweep=no/such", "sweep: there is no folder no/such"),
    (report, "sweep={empty}", "holds no job; sweeps are in runs/sweeps/<time>"),
    (report, "run={run} out={run}", "out: {run} is a folder; give a file"),
    (report, "run={run} out={run}/config.yaml", "config.yaml exists and is not a page; choose a name that ends"),
    (report, "run={run} out=/proc/report.html", ".part: No such file or directory"),
    (report, "run={run} colour=red", "colour: unknown key"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run")).run_dir


@pytest.mark.usefixtures("quick_compile", "shared_programs")
@pytest.mark.parametrize(("main", "words", "message"), MISTAKES)
def test_mistake_in_an_argument_is_one_line_with_exit_code_2(
    main: Any, words: str, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": run, "empty": tmp_path}
    assert exit_code(main, *words.format(**places).split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and message.format(**places) in printed.err.splitlines()[-1]
