"""The run folder: where it is, what stands in it beside metrics and checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from rlstable.config import ConfigError
from rlstable.config.renamed import updated
from rlstable.io.lock import RunLock

_RESULT = "result.json"
_CONFIRMED = "confirmed_"
# Between the numbers of a checkpoint and of that which is about to take its place.
ASIDE = ".superseded-by-"
# How the folders of seeds begin that are trained together.
_SEED = "seed-"
_RESERVE = ".reserve"
_RESERVED = 128 * 1024  # bytes, for how the run ended and the page about it
_LEAST_ROOM = 64 * 1024  # bytes that must be free, for config.yaml and the first lines


def default_run_dir(resume: str | None, env_name: str) -> str:
    """The folder of a run: the one that is resumed, else `runs/<env>/<time>`."""
    if resume not in (None, "auto"):
        return str(resume)
    # An environment given by import path would put a colon into a folder's name.
    return f"runs/{env_name.replace(':', '.')}/{datetime.now():%Y-%m-%d_%H-%M-%S}"


def seed_folder(run_dir: Path, seed: int) -> Path:
    """The folder of one seed of several in that of all of them."""
    return run_dir / f"{_SEED}{seed}"


def seed_folders(run_dir: Path) -> list[Path]:
    """The seed folders that exist, by seed."""
    found = [path for path in run_dir.glob(f"{_SEED}*") if path.name.removeprefix(_SEED).isdigit()]
    return sorted(found, key=seed_of)


def seed_of(folder: Path) -> int:
    """The seed that a folder is of."""
    return int(folder.name.removeprefix(_SEED))


def best_seed(run_dir: Path) -> Path | None:
    """The folder of the seed with the best return, of several that trained together; None where none has any saved."""
    saved = [folder for folder in seed_folders(run_dir) if has_checkpoint(folder)]
    scores = {folder: return_of(read_result(folder) or {}) for folder in saved}
    known = {folder: score for folder, score in scores.items() if score is not None}
    return max(known, key=lambda folder: known[folder], default=None)


def require_one_seed(run_dir: Path) -> None:
    """Checks that a folder is not that of several seeds that were trained together.

    Raises:
        ConfigError: It is; names the best of them.
    """
    folders = seed_folders(run_dir)
    if folders:
        best = best_seed(run_dir)
        which = f"such as {folders[0]}" if best is None else f"the best is {best}"
        raise ConfigError(f"run: {run_dir} holds {len(folders)} seeds; give the folder of one, {which}")


def open_run_dir(run_dir: Path, resume: str | None, seeds: int = 1) -> tuple[bool, RunLock]:
    """Makes the folder, locks it, and returns whether it holds a run to resume.

    Args:
        run_dir: The folder.
        resume: None, `auto`, or the folder itself.
        seeds: How many are trained together; several seeds have a subfolder each.

    Returns:
        Whether the folder holds a checkpoint that is to be continued, and its lock.

    Raises:
        ConfigError: It cannot be written, another process uses it, it holds a run that is not to be resumed, or holds
            none that could be.
    """
    _require_utf8(run_dir)
    _holds_a_run_to_resume(run_dir, resume, seeds)  # a mistake makes no folder
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / ".writable", " " * _LEAST_ROOM)
        (run_dir / ".writable").unlink()
        lock = RunLock(run_dir)
    except OSError as error:
        raise ConfigError(
            f"hydra.run.dir: cannot write to {run_dir}: {error.strerror or error}; choose another folder, or make this "
            "one writable"
        ) from error
    try:
        return _holds_a_run_to_resume(run_dir, resume, seeds), lock  # again: a run may have ended here since
    except BaseException:
        lock.release()
        raise


def _require_utf8(run_dir: Path) -> None:
    """Checks that the folder has a name that the library which writes checkpoints can take.

    Raises:
        ConfigError: It has not.
    """
    path = str(run_dir.absolute())
    try:
        path.encode()
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"hydra.run.dir: no checkpoint can be saved under {path!a}, whose name is not UTF-8 or is not read as "
            "such; choose another name, or set LC_ALL=C.UTF-8 (or PYTHONUTF8=1)"
        ) from error


def _holds_a_run_to_resume(run_dir: Path, resume: str | None, seeds: int) -> bool:
    own, together = has_checkpoint(run_dir), any(map(has_checkpoint, seed_folders(run_dir)))
    if resume is None and (run_dir / "metrics.jsonl").exists():
        raise ConfigError(
            f"hydra.run.dir: {run_dir} holds a run already; go on with it by resume=auto, or choose another folder"
        )
    if resume is not None and (together if seeds == 1 else own):
        there = f"of {len(seed_folders(run_dir))} seeds" if together else "of a single seed"
        had = len(seed_folders(run_dir)) if together else 1
        raise ConfigError(f"seeds: {run_dir} holds a run {there}, not of {seeds}; set seeds={had}")
    if resume not in (None, "auto") and not (own or together):
        raise ConfigError(f"resume: {run_dir} holds no checkpoint; give the folder of a run that saved one")
    return (own or together) and resume is not None


def has_checkpoint(run_dir: Path) -> bool:
    """Whether there is one in a run folder."""
    checkpoints = run_dir / "checkpoints"
    # The only one may have been set aside when the process was killed; it is brought back before it is read.
    return bool(steps_in(checkpoints)) or any(checkpoints.glob(f"*{ASIDE}*"))


def steps_in(directory: Path) -> list[int]:
    """Every complete checkpoint, ascending: orbax gives a folder its number as the last thing it does."""
    if not directory.is_dir():
        return []
    return sorted(int(entry.name) for entry in directory.iterdir() if re.fullmatch("[0-9]+", entry.name))


def write_config(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Leaves the configuration of the run; written once it is known to fit what the folder holds."""
    write_atomically(run_dir / "config.yaml", _yaml(config))


def reserve_room(run_dir: Path) -> None:
    """Takes room on the disk for `result.json` and the page, so that a disk that fills up has room for these."""
    with contextlib.suppress(OSError):  # less room is no reason not to train
        (run_dir / _RESERVE).write_bytes(os.urandom(_RESERVED))


def free_reserve(run_dir: Path) -> None:
    """Gives the reserved room free."""
    with contextlib.suppress(OSError):
        (run_dir / _RESERVE).unlink(missing_ok=True)


def write_machine(run_dir: Path, machine: Mapping[str, Any]) -> None:
    """Writes `machine.json`: device and versions, for comparing runs."""
    write_atomically(run_dir / "machine.json", json.dumps(machine, indent=2) + "\n")


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Writes `result.json`: how a run ended, for sweeps and pages."""
    write_atomically(run_dir / _RESULT, json.dumps(result, indent=2, default=str) + "\n")


def forget_result(run_dir: Path) -> None:
    """Deletes `result.json` of a run that continues."""
    with contextlib.suppress(OSError):
        (run_dir / _RESULT).unlink(missing_ok=True)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """How a run ended, or None where it has not, or the file is damaged."""
    try:
        found = json.loads((run_dir / _RESULT).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def confirmed_of(run_dir: Path) -> dict[str, Any]:
    """The fields `confirmed_*` of `result.json`; empty if no best policy is confirmed."""
    return {key: value for key, value in (read_result(run_dir) or {}).items() if key.startswith(_CONFIRMED)}


def return_of(result: Mapping[str, Any]) -> float | None:
    """The return that runs are compared by: the confirmed one, else that of the best single evaluation."""
    confirmed = result.get(f"{_CONFIRMED}return")
    value = result.get("best_return") if confirmed is None else confirmed
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in `config.yaml` of a run folder, with the keys of this version.

    Raises:
        ConfigError: There is none, it is damaged, or it has an option that this version no longer has.
    """
    path = folder / "config.yaml"
    if not folder.is_dir():
        raise ConfigError(f"run: there is no folder {folder}; runs are in runs/<env>/<time>")
    if not path.is_file():
        raise ConfigError(f"run: {folder} is no run folder, it has no config.yaml; runs are in runs/<env>/<time>")
    try:
        data = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # of several YAML libraries, and of the disk
        raise ConfigError(f"run: {path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"run: {path} holds no configuration")
    return updated({str(key): value for key, value in data.items()})


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _yaml(config: Mapping[str, Any]) -> str:
    return yaml.safe_dump(json.loads(json.dumps(config, default=list)), sort_keys=False, allow_unicode=True)
