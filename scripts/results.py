"""Files of results and the options of the commands that write them.

A result is a JSON object on a line of its own, so that a measurement that was stopped can resume.
"""

import argparse
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rlstable import __version__
from rlstable.config import ConfigError
from rlstable.device import machine
from scripts.process import ROOT, environment, last_line

Row = dict[str, Any]


def study_parser(
    doc: str | None, results: Path, seeds: int | None = None, **choices: Collection[str]
) -> argparse.ArgumentParser:
    """Returns the parser of a command that adds rows to a file of results and writes the page beside the file.

    Each keyword is an option that selects some of its choices, by default all. The option can be repeated. `seeds` is
    the usual number of seeds; `None` without such an option.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=results, help="file of the results; the page goes beside it")
    parser.add_argument("--page", action="store_true", help="write the page and train nothing")
    if seeds is not None:
        parser.add_argument("--seeds", type=int, default=seeds, help=f"number of seeds; default: {seeds}")
    for name, allowed in choices.items():
        shown = None if len(allowed) < 6 else name.upper()
        parser.add_argument(f"--{name}", action="append", choices=allowed, metavar=shown, help="default: all")
    return parser


def read(path: Path) -> list[Row]:
    """Returns the rows of a file; a missing file has none."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def add(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def matching(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def trips(metrics: Row) -> dict[str, int]:
    counts = {name.split("/")[1]: count for name, count in metrics.items() if re.fullmatch("guards/[^/]+/trips", name)}
    return {name: int(count) for name, count in counts.items() if count}


@functools.cache
def device() -> Row:
    """Returns the first device of JAX. Another process looks it up, because JAX would keep GPU memory in this one."""
    code = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"jax finds no device: {last_line(done.stderr) or 'no error message'}")
    name, kind = json.loads(done.stdout.splitlines()[-1])
    # JAX names every processor "cpu", so that the kind of a CPU is the processor's name.
    return {"platform": name, "kind": machine.name() if name == "cpu" else kind, "cpus": os.cpu_count()}


def versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("jax", "brax", "mujoco", "mujoco-mjx")}
    return {"python": platform.python_version(), **packages, "rlstable": __version__}


def commit() -> str | None:
    """Returns the commit of a checkout, with "+" if its code was changed since; None without a repository."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "rlstable", "configs", "scripts")
    return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "") or None


def provenance() -> Row:
    """Returns the commit, the versions and the device of a measurement."""
    return {"commit": commit(), "versions": versions(), "device": device()}
