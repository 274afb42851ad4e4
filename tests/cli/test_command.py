"""`key=value` arguments of the commands, and their errors."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from rlstable.cli import command
from rlstable.config.schema import ConfigError, Count, Flag, Section


class Options(Section):
    run: tuple[Path, ...] = Field(description="folders", min_length=1)
    out: Path | None = Field(None, description="where to")
    count: Count = Field(3, description="how many")
    fast: Flag = Field(True, description="whether")
    mode: Literal["a", "b"] | None = Field(None, description="how")


def test_arguments_are_parsed_into_options() -> None:
    found = command.options(Options, ["run=runs/2026-01-31", "run=123", "out=a=b", "count=7", "fast=false", "mode=b"])
    assert found == Options(run=(Path("runs/2026-01-31"), Path("123")), out=Path("a=b"), count=7, fast=False, mode="b")
    assert command.options(Options, ["run=x", "mode=null"]) == Options(run=(Path("x"),))
    assert command.options(Options, ["run=x", "count=010"]).count == 10
    assert command.options(Options, ["run=null", "out=null"]) == Options(run=(Path("null"),), out=None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "run: is missing; set it"),
        (["run=x", "out"], "cannot read 'out': write key=value; quote values with spaces"),
        (["tests"], "cannot read 'tests': write key=value, run=tests; quote values with spaces"),
        (["run="], "run: has no value; write run=<value>, or leave it out"),
        (["run=x", "cuont=3"], "cuont: unknown key; did you mean count?"),
        (["run=x", "count=3", "count=4"], "count: is set twice; leave one out"),
        (["run=x", "count=0"], "count: input should be greater than 0, got 0"),
        (["run=x", "count=2026-13-45"], "count: cannot read '2026-13-45'; put it in quotes"),
        (["run=x", "count=[1"], "count: cannot read '[1'; put it in quotes"),
        (["run=x", "fast=2"], "fast: input should be a valid boolean, got 2"),
        (["run=x", "mode=c"], "mode: input should be 'a' or 'b', got 'c'"),
    ],
)
def test_mistake_in_an_argument_is_one_line(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    with pytest.raises(ConfigError) as caught:
        command.options(Options, words)
    assert str(caught.value) == message


def test_help_explains_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command.key_parser("try", "Tries.", Options, "\nexamples:\n  try run=x\n")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    printed = capsys.readouterr().out
    assert "  run    folders\n  out    where to [null]\n  count  how many [3]\n  fast   whether [true]" in printed
    assert printed.endswith("examples:\n  try run=x\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--count", "3"], "cannot read --count: options are written count=<value>; --help lists what is allowed"),
        (["--count=3"], "cannot read --count: options are written count=3; --help lists what is allowed"),
    ],
)
def test_option_with_dashes_is_one_line_with_the_right_spelling(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.key_parser("try", "Tries.", Options, "").parse_intermixed_args(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"rlstable: {message}\n"


def test_stage_of_long_work_goes_on_until_the_next_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_PATIENCE", 0.04)
    shown = ""
    with command.working():
        command.note("playing")
        while "so far" not in shown:
            shown += capsys.readouterr().err
            time.sleep(0.01)
        command.note("drawing")
    lines = (shown + capsys.readouterr().err).splitlines()
    assert lines[0] == "playing ..." and lines[1].startswith("playing: ") and lines[-1] == "drawing ..."


def test_stage_on_a_terminal_has_a_clock_that_goes_when_the_work_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "is_terminal", lambda stream: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit), command.working():
        command.note("playing")
        raise ConfigError("no")
    shown = capsys.readouterr().err
    assert shown.startswith("playing ...\n") and "0:00:00" in shown
    assert shown.rstrip().endswith("rlstable: no") and command._stage._exit_callbacks == deque()
