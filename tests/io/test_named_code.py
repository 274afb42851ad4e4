"""Code that a downloaded run folder names is neither imported from the folder nor called if it could do anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlstable.compilation import sources
from rlstable.config import ConfigError
from rlstable.io import named_code

EVIL = "from pathlib import Path\nPath('imported').touch()\n"
MINE = """
from shutil import rmtree
class Env:
    reset = step = lambda self, *_: None
class Other:
    pass
def make(): return Env()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The settings of a downloaded run, in the folder where the user types commands and has a module of his own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run = tmp_path / "downloaded_run"
    for folder in (run, run / "seed-0", run / "incidents" / "12-1"):
        folder.mkdir(parents=True)
        (folder / "evil.py").write_text(EVIL)
    (tmp_path / "mine_named.py").write_text(MINE)
    yield run / "config.yaml"
    named_code._named.clear()
    for name in [name for name in sys.modules if name.startswith(("downloaded_run", "mine_named"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("os:system", "is a module of Python itself"),
        ("posix:system", "is a module of Python itself"),
        ("subprocess:run", "is a module of Python itself"),
        ("shutil:rmtree", "is a module of Python itself"),
        ("yaml:unsafe_load", "is no function of a module of your own"),
        ("numpy:load", "is no function of a module of your own"),
        ("hydra.utils:call", "is no function of a module of your own"),
        ("jax:jit", "is no function of a module of your own"),
        ("mine_named:rmtree", "is no function of a module of your own"),
        ("mine_named:Other", "is a class without reset and step"),
        ("downloaded_run.evil:Env", "is a file of that folder, "),
        ("downloaded_run.incidents.12-1.evil:Env", "is a file of that folder, "),
    ],
)
def test_code_that_could_do_anything_is_refused_unless_the_user_trusts_it(path: str, reason: str, file: Path) -> None:
    named_code.distrust(path, file, "trust=true")
    expected = rf"^env.name: {re.escape(path)}, which {file} names, {reason}.*; read that code, then add trust=true$"
    with pytest.raises(ConfigError, match=expected):
        sources.imported(path, "env.name")
    assert not Path("imported").exists()


@pytest.mark.parametrize("below", ["seed-0", "incidents/12-1"])
def test_run_folder_of_a_seed_and_of_an_incident_is_the_whole_folder(below: str, file: Path) -> None:
    named_code.distrust("downloaded_run.evil:Env", file.parent / below / "config.yaml", "trust=true")
    with pytest.raises(ConfigError, match="is a file of that folder"):
        sources.imported("downloaded_run.evil:Env", "env.name")


@pytest.mark.parametrize("path", ["mine_named:Env", "mine_named:make", "brax.envs.ant:Ant"])
def test_environments_and_functions_of_the_user_are_called_as_before(path: str, file: Path) -> None:
    named_code.distrust(path, file, "trust=true")
    assert sources.imported(path, "env.name").__name__ == path.partition(":")[2]


def test_trusted_code_and_typed_code_is_imported(file: Path) -> None:
    named_code.distrust("shutil:rmtree", file, "trust=true")
    named_code.trust("shutil:rmtree")
    assert sources.imported("shutil:rmtree", "env.name").__name__ == "rmtree"
