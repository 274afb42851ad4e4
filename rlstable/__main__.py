"""The command `rlstable <command>`, also `python -m rlstable <command>`: starts the other commands.

The listing, `--version` and a mistake import neither JAX nor the configuration.
"""

from __future__ import annotations

import difflib
import importlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rlstable import __version__

# By command the import path of its function, and its line in the listing.
COMMANDS = {
    "demo": ("rlstable.demo.__main__:main", "watch trained policies that come with the package"),
    "train": ("rlstable.train:command", "train a policy: rlstable train env=ant ppo.learning_rate=1e-4"),
    "evaluate": ("rlstable.evaluate:main", "play many episodes with a policy: returns with intervals"),
    "render": ("rlstable.render.__main__:main", "draw episodes as a 3D page, or as films"),
    "report": ("rlstable.report.__main__:main", "write a page about one run or several"),
    "export": ("rlstable.export.__main__:main", "write a policy as ONNX and StableHLO"),
    "play": ("rlstable.play:main", "run an exported policy of a robot in plain MuJoCo"),
    "doctor": ("rlstable.doctor.__main__:process", "check this machine and a model before a run"),
    "replay": ("rlstable.replay.__main__:main", "repeat a bad step of an incident in three engines"),
    "sweep-report": ("rlstable.report.__main__:sweep_report", "write a page about a sweep"),
    "version": ("rlstable.__main__:version", "print the version"),
}
_CONFIG_ERROR = 2  # exit code


def main(argv: Sequence[str] | None = None) -> None:
    """Starts the command that the first word names; without words, lists the commands."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(listing())
        return
    name = "version" if "--version" in words or words[0] == "-V" else words[0]
    if name not in COMMANDS:
        print(f"rlstable: {mistake(name)}", file=sys.stderr)
        sys.exit(_CONFIG_ERROR)
    module, _, function = COMMANDS[name][0].partition(":")
    sys.argv = [f"{_typed()} {name}", *words[1:]]  # Hydra reads it, and printed commands begin with it
    getattr(importlib.import_module(module), function)()


def _typed() -> str:
    """The word that starts this program in a shell: `rlstable`, or its path outside of PATH."""
    path, found = Path(sys.argv[0]), shutil.which("rlstable")
    in_path = path.name != "rlstable" or (found is not None and Path(found).absolute() == path.absolute())
    return "rlstable" if in_path or " " in str(path) else str(path)


def listing() -> str:
    """The commands with a line each."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items())
    return (
        f"rlstable {__version__}: PPO on Brax and MuJoCo MJX environments that does not blow up.\n\n"
        f"usage: rlstable <command> ...\n\n{rows}\n\n"
        "rlstable <command> --help explains a command. evaluate, render, report and export take the newest run in the "
        "folder\nruns, or run=<folder>."
    )


def mistake(name: str) -> str:
    """The error for a word that is no command."""
    if "=" in name:
        return f"{name!r} is no command; write rlstable train {name}"
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(COMMANDS)}"
    return f"unknown command {name!r}; {hint}"


def version() -> None:
    """Prints the version."""
    print(f"rlstable {__version__}")


if __name__ == "__main__":
    main()
