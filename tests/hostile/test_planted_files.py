"""Links, pipes and bombs that another user planted in a run folder: nothing outside changes, and no command hangs."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import exit_code
from short_runs import short_config

from rlstable import load_policy
from rlstable.config import Config, ConfigError
from rlstable.export.__main__ import main as export
from rlstable.io.files import read, read_json, write_atomically
from rlstable.io.run_folder import read_settings
from rlstable.listeners import listeners_of
from rlstable.replay.__main__ import main as replay
from rlstable.report.__main__ import main as report
from rlstable.report.run_record import read_record
from rlstable.runner.loop import TrainingLoop
from rlstable.supervise.incident import read as read_incident

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
SECRET = "another user's secret"
_opened: list[Path] = []
_watched: list[Path] = []


def config(iterations: int, **sections: Any) -> Config:
    return short_config(
        total_steps=64 * iterations,
        env={"kwargs": {"fault": "physics", "probability": 0.1}},
        checkpoint={"every": 1, "keep": 2, "asynchronous": False},
        logging={"console": "off", "tensorboard": True},
        supervise={"recovery": {"enabled": False}, "incident": {"keep": 9, "window": 1}},
        **sections,
    )


def like_a_command(call: Callable[[Path], Any]) -> Callable[[Path], int]:
    """A function of Python with the exit code and the error line of a command."""

    def code(folder: Path) -> int:
        try:
            call(folder)
        except ConfigError as error:
            print(f"rlstable: {error}", file=sys.stderr)
            return 2
        return 0

    return code


def resumed(folder: Path) -> None:
    again = config(3, resume="auto")
    TrainingLoop(again, folder, listeners=listeners_of(again.render, again.logging)).run()


COMMANDS: dict[str, Callable[[Path], int]] = {
    "report": lambda folder: exit_code(report, f"run={folder}"),
    "export": lambda folder: exit_code(export, f"run={folder}", "format=stablehlo"),
    "load_policy": like_a_command(load_policy),
    "resume": like_a_command(resumed),
    "incident": like_a_command(lambda folder: read_incident(next((folder / "incidents").iterdir()))),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "run"
    TrainingLoop(config(2), folder).run()
    return folder


def watch(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in ("open", "os.mkdir", "os.rename", "os.scandir", "os.listdir"):
        for arg in args[: 2 if event == "os.rename" else 1]:
            if isinstance(arg, str | bytes | os.PathLike):
                path = Path(os.fsdecode(arg)).absolute()
                if path.is_relative_to(_watched[0]) and path != _watched[0]:
                    _opened.append(path.relative_to(_watched[0]))


def names_opened(command: Callable[[Path], int], folder: Path) -> set[str]:
    """The files and folders that a command opens, checkpoints without their insides."""
    if watch not in _hooks:
        sys.addaudithook(watch)
        _hooks.append(watch)
    _opened.clear()
    _watched[:] = [folder]
    try:
        assert command(folder) == 0
    finally:
        _watched.clear()
    found = {str(Path(*name.parts[: 2 if name.parts[0] == "checkpoints" else None])) for name in _opened}
    return {
        name for name in found if ".part" not in name and "orbax-checkpoint-tmp" not in name and "tfevents" not in name
    }


_hooks: list[Any] = []


def contents(folder: Path) -> dict[str, bytes | None]:
    found = folder.rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.parametrize("command", COMMANDS)
def test_link_under_any_name_that_a_command_opens_is_not_followed(
    command: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = COMMANDS[command]
    shutil.copytree(original, tmp_path / "first")
    names = names_opened(call, tmp_path / "first")
    expected = {
        "report": {"config.yaml", "metrics.jsonl", "events.jsonl", "result.json", "machine.json", "report.html"},
        "export": {"config.yaml", "checkpoints", "export", "export/policy.stablehlo", "export/policy.json"},
        "load_policy": {"checkpoints", "result.json"},
        "resume": {".lock", ".reserve", "checkpoints", "checkpoints/.retired", "events.jsonl", "metrics.jsonl",
                   "tensorboard", "incidents", "config.yaml", "machine.json", "result.json", "report.html"},
        "incident": {"incidents"},
    }  # fmt: skip
    assert expected[command] <= names
    for number, name in enumerate(sorted(names)):
        folder, outside = tmp_path / f"run-{number}", tmp_path / f"outside-{number}"
        shutil.copytree(original, folder)
        planted = folder / name
        inner = (tmp_path / "first" / name).is_dir() or name == "checkpoints/.retired"
        outside.mkdir()
        if planted.is_dir():
            planted.rename(outside / "target")
        elif inner:
            (outside / "target").mkdir()
            (outside / "target" / "precious").write_text(SECRET)
        else:
            planted.parent.mkdir(exist_ok=True)
            (outside / "target").write_bytes(planted.read_bytes() if planted.exists() else SECRET.encode())
            planted.unlink(missing_ok=True)
        planted.symlink_to(outside / "target")
        before = contents(outside)
        capsys.readouterr()
        code, errors = call(folder), capsys.readouterr().err
        assert contents(outside) == before, name
        assert code in (0, 2), name
        assert "Traceback" not in errors, (name, errors)
        if code:
            assert errors.splitlines()[-1].startswith("rlstable: "), (name, errors)


def test_content_behind_a_link_is_in_no_page(original: Path, tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret"
    shutil.copytree(original, folder)
    secret.write_text(json.dumps({"device": SECRET, "processor": SECRET}))
    (folder / "machine.json").unlink()
    (folder / "machine.json").symlink_to(secret)
    assert exit_code(report, f"run={folder}") == 0
    assert SECRET not in (folder / "report.html").read_text()


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\n"
DEEP = "[" * 200_000


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "machine.json", "metrics.jsonl", "events.jsonl"])
@pytest.mark.parametrize("content", [BOMB, DEEP, None, "9" * 400], ids=["aliases", "deep", "pipe", "huge number"])
def test_bomb_or_pipe_is_one_line_or_no_matter(name: str, content: str | None, original: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    (folder / name).unlink()
    if content is None:
        os.mkfifo(folder / name)
    else:
        (folder / name).write_text(content)
    is_lines, is_pipe = name.endswith(".jsonl"), content is None
    if name == "config.yaml" or (is_lines and is_pipe):
        with pytest.raises(ConfigError, match=f"^run: {folder / name} "):
            read_record(folder)
    else:
        read_record(folder)


def test_incident_behind_a_pipe_is_one_line(original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    incident = next((folder / "incidents").iterdir())
    (incident / "arrays.npz").unlink()
    os.mkfifo(incident / "arrays.npz")
    assert exit_code(replay, str(incident)) == 2
    assert "is not a regular file" in capsys.readouterr().err.splitlines()[-1]


def test_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlstable.io.files._MOST", 100)
    (tmp_path / "result.json").write_text(json.dumps("x" * 98))
    assert read_json(tmp_path / "result.json") == "x" * 98
    (tmp_path / "result.json").write_text(json.dumps("x" * 99))
    with pytest.raises(ConfigError, match="is larger than"):
        read(tmp_path / "result.json")


def test_failed_write_leaves_the_old_file_and_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "file", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_yaml_numbers_are_read_as_hydra_reads_them(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("rate: 1e-3\n")
    assert read_settings(tmp_path)["rate"] == 1e-3
