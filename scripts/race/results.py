"""What was measured, a line of JSON per leg, and where and in which versions it was."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from rlstable import __version__
from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.device import machine as processor
from scripts.race.legs import Leg, Row
from scripts.race.process import ROOT, environment, pins

RIVALS = ("brax", "sb3", "sbx", "rsl_rl")


@functools.cache
def device() -> Row:
    """Where it runs; asked of another process, since one that has used a GPU keeps its memory."""
    code = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind]))"
    said = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    if said.returncode:
        raise ConfigError(
            f"race: jax finds no device: {(said.stderr.strip().splitlines() or ['it does not say why'])[-1]}"
        )
    found = json.loads(said.stdout.splitlines()[-1])
    return described(*found)


def described(platform_name: str, kind: str) -> Row:
    """A device without a name of the machine; what jax calls "cpu" is of many kinds, two of which nobody may compare.

    Args:
        platform_name: As jax calls it.
        kind: As jax calls it.
    """
    is_cpu = platform_name == "cpu"
    return {"platform": platform_name, "kind": processor.name() if is_cpu else kind, "cpus": os.cpu_count()}


def versions(side: str) -> dict[str, str]:
    """What a side is measured in."""
    if side not in RIVALS:
        own = {name: metadata.version(name) for name in ("jax", "brax", "mujoco", "mujoco-mjx")}
        return {"python": platform.python_version(), **own, "rlstable": __version__}
    return {"python": platform.python_version(), **pins(side)}


def commit(root: Path | None = None) -> str | None:
    """Commit of the measured code, with a plus if files differ from it; None without a repository.

    Args:
        root: Checkout of that code, None for this one.
    """

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=root or ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "rlstable", "configs", "scripts")
        return git("rev-parse", "--short=7", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def identity(leg: Leg, kind: str) -> Row:
    """What two rows that may be compared over rounds have in common.

    Args:
        leg: What was measured.
        kind: Of the device.
    """
    fixed = {name: getattr(leg, name) for name in ("measure", "task", "side", "case", "warm", "threshold")}
    common = {**fixed, "kind": kind, "settings": leg.text, "versions": versions(leg.side)}
    return common | ({"recipe": recipe(leg)} if leg.side == "ours" else {})


def recipe(leg: Leg) -> str:
    """A digest of what a leg of ours trains with, so that one with another recipe is another measurement."""
    config = compose(list(leg.settings))
    chosen = {"ppo": config.ppo.model_dump(mode="json"), "network": config.network.model_dump(mode="json")}
    return hashlib.blake2s(json.dumps(chosen, sort_keys=True).encode(), digest_size=4).hexdigest()


def measured(rows: Sequence[Row], leg: Leg, kind: str) -> dict[int, Row]:
    """A leg's results by round; one that ran out of less time than there is now has none."""
    wanted = identity(leg, kind)
    own = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return {row["round"]: row for row in own if row.get("ending") != "time limit" or row["limit"] >= leg.limit}


def read(path: Path) -> list[Row]:
    """The results so far.

    Raises:
        ConfigError: It is no file of results.
    """
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def add(path: Path, row: Row) -> None:
    """One more line.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}") from error
