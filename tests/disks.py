"""A small disk, which a test can fill."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Makes a folder a disk of four megabytes; skips the test where this is not permitted."""
    folder.mkdir()
    mount(folder, "size=4m")
    yield
    subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(folder: Path, options: str) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a small disk is not permitted here: {getattr(error, 'stderr', error)}")


def fill(disk: Path) -> Path:
    """A file that takes all the room there is, also that to the end of the last page of a log."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    for path in disk.glob("*.jsonl"):
        with path.open("ab") as logged:
            logged.write(b"\n" * (-path.stat().st_size % 4096))
    return filler
