"""Printed commands: their words, and that each command reads its own."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from rlstable.cli.command import options
from rlstable.cli.compose import compose
from rlstable.evaluate import EvaluateOptions
from rlstable.export.__main__ import ExportOptions
from rlstable.io.printed_commands import command, train_command
from rlstable.io.run_folder import write_config
from rlstable.render.__main__ import RenderOptions
from rlstable.report.__main__ import ReportOptions
from rlstable.runner.summary import describe
from rlstable.supervise.stop_reasons import StopReason


@pytest.mark.parametrize(
    ("program", "printed"),
    [("rlstable train", "rlstable"), (".venv/bin/rlstable render", ".venv/bin/rlstable"), ("/x/train.py", None)],
)
def test_printed_commands_begin_with_the_word_that_was_typed(
    program: str, printed: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    evaluate, train = command("evaluate", here / "a b", "run="), train_command(["env=ant", "seed=1"])
    if printed is None:
        assert evaluate.endswith(" -m rlstable.evaluate 'run=a b'") and train.endswith(
            " -m rlstable.train env=ant seed=1"
        )
    else:
        assert (evaluate, train) == (f"{printed} evaluate 'run=a b'", f"{printed} train env=ant seed=1")


NAMES = [
    "2026-01-31_22-00-00", "my runs", "läufe", "[1]", "{a: b}", "(x)", "it's", 'say "x"', "a,b", "seed=1", "null",
    "back\\slash", "a\\'b", 'end\\', "~tilde", "#5", "50 %", "$HOME", "a;b&c", "*", "!x", "a:b", "-dash", "日本",
    "auto", "latest", "1e3",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings() -> dict:
    return compose(["env=fast"]).model_dump(mode="json")


@pytest.mark.parametrize("name", NAMES)
def test_printed_resume_command_resumes_its_folder(
    name: str, settings: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_config(folder, settings)
    fields = {"step": 10, "return": 1.0, "best_return": 1.0, "seconds": 1.0}
    for here in (tmp_path, tmp_path.parent, Path("/usr")):
        monkeypatch.chdir(here)
        printed = dict(describe(StopReason.completed, fields, folder, folder))["resume"]
        words = shlex.split(printed)
        assert words[1:3] == ["-m", "rlstable.train"]
        config = compose(words[3:])
        assert (here / str(config.resume), config.total_steps, config.env.name) == (folder, 20, "fast")


@pytest.mark.parametrize("name", NAMES)
def test_other_commands_read_the_printed_folder(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for printed, model in (("evaluate", EvaluateOptions), ("render", RenderOptions), ("export", ExportOptions)):
        words = shlex.split(command(printed, here / name, "run="))
        assert words[1:3] == ["-m", f"rlstable.{printed}"]
        assert here / options(model, words[3:]).run == here / name
    words = shlex.split(command("report", here / name, "sweep="))
    assert here / str(options(ReportOptions, words[3:]).sweep) == here / name
    (incident,) = shlex.split(command("replay", here / name))[3:]
    assert here / incident == here / name and not incident.startswith("-")
    (here / "gone").mkdir()
    monkeypatch.chdir(here / "gone")
    Path.cwd().rmdir()
    assert str(here) in command("evaluate", here / name, "run=")
