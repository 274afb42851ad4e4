"""Run folders of other users: their code is imported only if this user agrees."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from commands import exit_code
from short_runs import trained

from rlstable import load_policy, train
from rlstable.evaluate import main as evaluate
from rlstable.export.__main__ import main as export
from rlstable.render.__main__ import main as render
from rlstable.replay.__main__ import main as replay
from rlstable.report.__main__ import main as report

pytestmark = pytest.mark.usefixtures("quick_compile", "shared_programs")
COPY = "rlstable_test_stranger"
CODE = """
from pathlib import Path
from toys import PointMass
Path("imported").touch()
"""


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an incident."""
    folder = tmp_path_factory.mktemp("run")
    incidents = {"recovery": {"enabled": False}, "incident": {"keep": 1}}
    trained(folder, env={"kwargs": {"fault": "physics", "probability": 0.1}}, supervise=incidents)
    return folder


@pytest.fixture
def stranger(made_here: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of another user and its module, whose import creates a file."""
    folder = here / "run"
    shutil.copytree(made_here, folder)
    (here / f"{COPY}.py").write_text(CODE)
    name(folder, f"{COPY}:PointMass")
    for part in (folder, incident(folder)):
        part.chmod(0o777)  # another user may write it
    monkeypatch.setattr(sys, "path", list(sys.path))
    importlib.invalidate_caches()
    yield folder
    sys.modules.pop(COPY, None)


def name(folder: Path, env: str, kwargs: dict[str, str] | None = None) -> None:
    """Writes another environment into a run's settings and its incident's."""
    path = folder / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["env"] |= {"name": env} | ({} if kwargs is None else {"kwargs": kwargs})
    path.write_text(yaml.safe_dump(settings))
    path = incident(folder) / "incident.json"
    facts = json.loads(path.read_text())
    facts["config"]["env"] |= {"name": env} | ({} if kwargs is None else {"kwargs": kwargs})
    path.write_text(json.dumps(facts))


def incident(folder: Path) -> Path:
    [found] = (folder / "incidents").iterdir()
    return found


def resume(words: Sequence[str] | None) -> None:
    """Runs `python -m rlstable.train`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["rlstable.train", *(words or ())])
        train.main()


COMMANDS: dict[str, tuple[Callable[[Sequence[str] | None], None], Callable[[Path], list[str]], str]] = {
    "evaluate": (evaluate, lambda folder: [f"run={folder}", "episodes=2"], "trust=true"),
    "render": (render, lambda folder: [f"run={folder}", "episodes=2", "format=html"], "trust=true"),
    "replay": (replay, lambda folder: [str(incident(folder))], "--trust"),
    "resume": (resume, lambda folder: [f"resume={folder}", "total_steps=192"], "trust=true"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_code_of_another_user_is_imported_only_with_trust(
    command: str, stranger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, words, agree = COMMANDS[command]
    before = list(sys.path)
    assert exit_code(main, *words(stranger)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"names code outside rlstable, Brax and Playground, env.name={COPY}:PointMass" in last
    assert last.endswith(f"read that code, then add {agree}, or chmod go-w your own folder")
    assert not Path("imported").exists() and sys.path == before
    # `render` imports the environment, then fails because a point mass has no model to draw.
    assert exit_code(main, *words(stranger), agree) == (2 if command == "render" else 0)
    assert Path("imported").exists()


def test_trust_written_in_the_settings_of_a_folder_is_ignored(stranger: Path) -> None:
    with (stranger / "config.yaml").open("a") as file:
        file.write("trust: true\n")
    for command in ("evaluate", "resume"):
        main, words, _ = COMMANDS[command]
        assert exit_code(main, *words(stranger)) == 2
    assert not Path("imported").exists()


@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_compiled_programs_that_a_folder_names_are_not_executed(command: str, made_here: Path, here: Path) -> None:
    """The folder belongs to this user, as every download does."""
    folder = here / "copied"
    shutil.copytree(made_here, folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"compile_cache": "programs"}))
    main, words, _ = COMMANDS[command]
    assert exit_code(main, *words(folder)) == 0
    assert not Path("programs").exists()


def test_folder_made_by_the_same_user_needs_no_trust(
    made_here: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From any working directory, before and after it was resumed."""
    assert exit_code(evaluate, f"run={made_here}", "episodes=2") == 0
    assert exit_code(replay, str(incident(made_here))) == 0
    monkeypatch.chdir(made_here.parent)
    shutil.copytree(made_here, here / "copied")
    assert exit_code(evaluate, f"run={here / 'copied'}", "episodes=2") == 0
    assert exit_code(resume, f"resume={made_here.name}", "total_steps=192") == 0
    assert exit_code(evaluate, f"run={made_here.name}", "episodes=2") == 0
    assert "trust" not in (made_here / "config.yaml").read_text()


def test_opening_a_folder_runs_none_of_its_code(stranger: Path) -> None:
    """The policy, the report and the export need no environment."""
    assert load_policy(stranger).networks.action_size == 2
    assert exit_code(report, f"run={stranger}", "out=page.html") == 0
    assert exit_code(export, f"run={stranger}", "format=stablehlo") == 0
    assert not Path("imported").exists()
