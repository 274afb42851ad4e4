"""Commands that are printed for the user, as the user types them in a shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlstable.config.overrides import literal

_WORDS = ("auto", "latest", "null")  # values of a path key with a meaning of their own


def command(name: str, path: Path, key: str = "") -> str:
    """The command line for a command of rlstable; `key` such as `run=`."""
    shown = short_path(path)
    if shown.startswith("-") or shown in _WORDS:
        shown = str(path.absolute())
    if name == "train":
        shown = literal(shown)  # only `train` reads Hydra's grammar; the other commands take a path literally
    return f"{_program(name)} {shlex.quote(key + shown)}"


def train_command(overrides: Sequence[str]) -> str:
    """The command line that trains with these overrides."""
    return f"{_program('train')} {shlex.join(overrides)}"


def short_path(path: Path) -> str:
    """The path from the working folder, if the path is in it and the folder was not deleted."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return str(path)


def _program(name: str) -> str:
    """The start of a command in the words that started this process: `rlstable <name>`, or Python and a module."""
    typed = sys.argv[0].rpartition(" ")[0]  # `rlstable.__main__` writes it
    return f"{typed} {name}" if typed.endswith("rlstable") else f"{shlex.quote(_python())} -m rlstable.{name}"


def _python() -> str:
    """The path of this Python from the working folder, or `python` if that starts the same Python."""
    python = shutil.which("python")
    if python is not None and Path(python).absolute() == Path(sys.executable).absolute():
        return "python"
    return short_path(Path(sys.executable).absolute())
