"""The doctor command as a user types it: its output and exit code."""

from __future__ import annotations

import functools
import json

import pytest
from commands import SMALLEST, exit_code

from rlstable.compilation import sources
from rlstable.doctor import __main__ as doctor
from rlstable.doctor.__main__ import main

pytestmark = pytest.mark.usefixtures("quick_compile")
TOY = [*SMALLEST, "devices=1", "guards=off"]


run = functools.partial(exit_code, main)


def test_doctor_prints_a_readable_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TOY) == 0
    printed = capsys.readouterr()
    lines = [line.rstrip() for line in printed.out.splitlines()]
    titles = ["Machine", "Memory", "Findings (toys:PointMass, toy)"]
    assert [line for line in lines if line in titles] == titles
    assert "physics: the environment has no MuJoCo model" in printed.out
    assert lines[-1] == "toys:PointMass: ready"
    assert max(map(len, lines)) <= 120
    assert "compiling the training program" in printed.err


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", *TOY, "--no-compile", "precision=highest") == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert (data["verdict"], data["exit_code"], data["task"]) == ("ready", 0, "toys:PointMass")
    assert data["memory"]["footprint"] is None
    assert "compiling" not in printed.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["env=humanoyd"], "env: unknown option 'humanoyd'; did you mean humanoid?"),
        ([*TOY, "devices=3"], "ppo.batch_size: 8 does not divide evenly among 3 devices"),
    ],
)
def test_doctor_reports_a_mistake_in_one_line_with_exit_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*args, "--json") == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"rlstable: {message}")
    assert len(printed.err.splitlines()) == 1
    assert printed.out == ""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["ant", "humanoid", "inverted_pendulum"])
def test_tasks_of_brax_are_ready(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"env={task}", "devices=1", "--no-compile", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ready"


def test_only_a_separate_process_uses_the_trace_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    unmodified: list[bool] = []
    monkeypatch.setattr(doctor, "main", lambda: unmodified.append(sources._unmodified))
    doctor.process()
    assert unmodified == [True]
