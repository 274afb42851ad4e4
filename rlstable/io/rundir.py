"""The run folder: where it is, what stands in it beside metrics and checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError

_RESULT = "result.json"


def default_run_dir(resume: str | None, env_name: str) -> str:
    """The folder of a run: the one that is resumed, else `runs/<env>/<time>`."""
    if resume not in (None, "auto"):
        return str(resume)
    # An environment given by import path would put a colon into a folder's name.
    return f"runs/{env_name.replace(':', '.')}/{datetime.now():%Y-%m-%d_%H-%M-%S}"


def open_run_dir(run_dir: Path, resume: str | None) -> bool:
    """Makes the folder and says whether there is a run in it to go on with.

    Args:
        run_dir: The folder.
        resume: None, `auto`, or the folder itself.

    Returns:
        Whether the folder holds a checkpoint that is to be continued.

    Raises:
        ConfigError: It cannot be written, holds a run that is not to be resumed, or holds none that could be.
    """
    folder = run_dir / "checkpoints"
    has_checkpoint = folder.is_dir() and any(entry.name.isdigit() for entry in folder.iterdir())
    if resume is None and (run_dir / "metrics.jsonl").exists():
        raise ConfigError(
            f"hydra.run.dir: {run_dir} holds a run already; go on with it by resume=auto, or choose another folder"
        )
    if resume not in (None, "auto") and not has_checkpoint:
        raise ConfigError(f"resume: {run_dir} holds no checkpoint; give the folder of a run that saved one")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / ".writable", "")
        (run_dir / ".writable").unlink()
    except OSError as error:
        raise ConfigError(f"hydra.run.dir: cannot write to {run_dir}: {error.strerror or error}") from error
    return has_checkpoint and resume is not None


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Leaves the configuration of the run; written once it is known to fit what the folder holds."""
    write_atomically(run_dir / "config.yaml", _yaml(config))


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Leaves how a run ended, for a sweep's table and for whoever looks later."""
    write_atomically(run_dir / _RESULT, json.dumps(result, indent=2, default=str) + "\n")


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """How a run ended, or None where it has not, or the file is torn."""
    try:
        return json.loads((run_dir / _RESULT).read_text())
    except (OSError, json.JSONDecodeError):
        return None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _yaml(config: Mapping[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(config, default=list)), sort_keys=False, allow_unicode=True)
