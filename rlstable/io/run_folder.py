"""The run folder: its path, its lock, and its files except metrics and checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from rlstable.config import ConfigError
from rlstable.config.schema import expand_home, first_line
from rlstable.io.files import below, read_json, read_yaml, require_replaceable, write_atomically
from rlstable.io.lock import RunLock
from rlstable.io.outcome import outcome_of

KEPT_MODEL = "model.zip"  # copy of a robot's model with all its files
KEPT_TEACHER = "teacher"  # folder with a copy of the policy of `ppo.teacher`
_RESULT, _OVERRIDES = "result.json", "overrides.json"
_CHANGING = (_RESULT, "metrics.jsonl", "config.yaml")  # files whose times show when a run was last active
_WRITTEN = (
    "machine.json", "config.yaml", _RESULT, "report.html", "metrics.jsonl", "events.jsonl", KEPT_MODEL, "checkpoints",
    KEPT_TEACHER, "incidents", "episodes",
)  # fmt: skip
_CONFIRMED = "confirmed_"
_SEED = "seed-"  # prefix of the folders of seeds that train together
_RESERVE = ".reserve"
_DEMOS = Path(__file__).parents[1] / "demo"
_RESERVED = 128 * 1024  # bytes, for result.json and report.html


def demos() -> list[str]:
    """Names of the policies that come with the package."""
    return sorted(path.parent.name for path in _DEMOS.glob("*/overrides.json"))


def located(folder: str | Path) -> Path:
    """The run folder that a user names; `demo:<name>` is a policy of the package, a `ConfigError` if it has none."""
    name = str(folder).removeprefix("demo:")
    if name == str(folder):
        return expand_home(folder)
    if name not in demos():
        raise ConfigError(f"run_dir: there is no policy {folder}; there are {', '.join(f'demo:{x}' for x in demos())}")
    return _DEMOS / name


def default_run_dir(resume: str | None, env_name: str) -> str:
    """The folder of a run: the resumed folder, else a new folder `runs/<env>/<time>`, or `<time>-2` if that exists."""
    if resume not in (None, "auto"):
        return str(expand_home(str(resume)))
    # An import path contains a colon, which is not allowed in every folder name.
    name = f"runs/{env_name.replace(':', '.')}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder, number = name, 1
    while not _created(folder):
        number += 1
        folder = f"{name}-{number}"
    return folder


def _created(folder: str) -> bool:
    """Creates a folder; False if it exists. If it cannot be created, the run that writes to it reports that."""
    try:
        os.makedirs(folder, mode=0o755)  # also with umask 002, because the settings may name code
    except OSError:
        return not os.path.isdir(folder)
    return True


def newest_run(root: Path = Path("runs")) -> Path | None:
    """The run folder whose result, metrics or configuration changed last; None without a run."""
    changed = {}
    for parent, folders, files in os.walk(root):
        if "config.yaml" in files:
            folders.clear()  # checkpoints, and seeds that belong to this run
            run = Path(parent)
            changed[run] = max(_changed(folder / name) for folder in (run, *seed_folders(run)) for name in _CHANGING)
    return max(changed, key=lambda folder: changed[folder], default=None)


def _changed(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def seed_folder(run_dir: Path, seed: int) -> Path:
    return below(run_dir, f"{_SEED}{seed}")


def seed_folders(run_dir: Path) -> list[Path]:
    """The existing seed folders, sorted by seed."""
    folders = [path for path in run_dir.glob(f"{_SEED}*") if re.fullmatch("[0-9]{1,18}", path.name.removeprefix(_SEED))]
    return sorted((path for path in folders if not path.is_symlink()), key=seed_of)


def resumed_folders(resume: str | None, run_dir: Path) -> list[Path]:
    """The folder that a run resumes, and its seed folders; empty for a new run."""
    if resume is None:
        return []
    folder = run_dir if resume == "auto" else Path(resume)
    return [folder, *seed_folders(folder)]


def seed_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_SEED))


def best_seed(run_dir: Path) -> Path | None:
    """The folder of the seed with the best return; None if no seed with a checkpoint has a return."""
    saved = [folder for folder in seed_folders(run_dir) if has_checkpoint(folder)]
    scores = {folder: outcome_of(read_result(folder)).value for folder in saved}
    known = {folder: score for folder, score in scores.items() if score is not None}
    return max(known, key=lambda folder: known[folder], default=None)


def require_one_seed(run_dir: Path) -> None:
    """Raises a `ConfigError` that names the folder of the best seed if a run folder holds several seeds."""
    folders = seed_folders(run_dir)
    if folders:
        best = best_seed(run_dir)
        which = f"such as {folders[0]}" if best is None else f"the best is {best}"
        raise ConfigError(f"run: {run_dir} holds {len(folders)} seeds; give the folder of one, {which}")


def open_run_dir(run_dir: Path, resume: str | None, seeds: int = 1) -> tuple[bool, RunLock]:
    """Creates and locks the run folder, and reserves disk space in it for `result.json` and `report.html`.

    A folder with a file of the user that a run would replace is refused.

    `resume` is None, `auto`, the folder itself, or the folder of another run, which is copied to `run_dir`. Returns
    whether the run resumes from a checkpoint in the folder, and the lock. Raises `ConfigError` if the folder cannot be
    written, another process uses it, it already holds a run and `resume` is None, or it holds no run to resume.
    """
    require_usable_name(run_dir)
    require_own(run_dir)
    original = None
    # Checked first, so that a mistake creates no folder.
    if resume not in (None, "auto") and Path(str(resume)).resolve() != run_dir.resolve():
        original = Path(str(resume))
        _holds_a_run_to_resume(original, resume, seeds)
        resume = None  # the folder of the copy must be free
    _holds_a_run_to_resume(run_dir, resume, seeds)
    with contextlib.ExitStack() as failed:
        try:
            run_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = RunLock(run_dir)
            failed.callback(lock.release)
            failed.callback(free_reserve, run_dir)
            write_atomically(run_dir / _RESERVE, os.urandom(_RESERVED))
            resumes = _holds_a_run_to_resume(run_dir, resume, seeds)  # a run may have ended since the first check
            if original is not None:
                own = shutil.ignore_patterns(".lock", _RESERVE, "wandb", "*.orbax-checkpoint-tmp*")
                shutil.copytree(original, run_dir, symlinks=True, ignore=own, dirs_exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir: cannot write to {run_dir}: {error.strerror or first_line(error)}; choose another "
                "folder, or make this one writable"
            ) from error
        failed.pop_all()
    return resumes or original is not None, lock


def require_own(run_dir: Path) -> None:
    """Raises a `ConfigError` that names the file if a folder holds what a run would replace, and no run."""
    of_seeds = (f"{folder.name}/machine.json" for folder in seed_folders(run_dir))
    require_replaceable(run_dir, (*_WRITTEN, *of_seeds), "hydra.run.dir")


def require_the_same_seeds(run_dir: Path, seeds: range) -> None:
    """Raises a `ConfigError` unless the configured seeds include every saved one."""
    saved = [seed_of(folder) for folder in seed_folders(run_dir) if has_checkpoint(folder)]
    if not set(saved) <= set(seeds):
        raise ConfigError(
            f"seeds: {run_dir} holds seeds {min(saved)} to {max(saved)}, and the configured seeds from {seeds[0]} on "
            f"lack some; set seed={min(saved)} seeds={max(saved) - min(saved) + 1}, or more"
        )


def require_usable_name(run_dir: Path) -> None:
    """Raises a `ConfigError` if orbax cannot use the folder's name, which TensorStore and `glob` read as a pattern."""
    path = str(run_dir.absolute())
    with contextlib.suppress(UnicodeEncodeError):
        if os.fsencode(path) == path.encode() and not set("\\[]*?") & set(path):
            return
    raise ConfigError(
        f"hydra.run.dir: cannot save checkpoints in {path!a}; choose a name without \\ [ ] * and ?, "
        "and set LC_ALL=C.UTF-8 if it is not ASCII"
    )


def _holds_a_run_to_resume(run_dir: Path, resume: str | None, seeds: int) -> bool:
    """Whether a run resumes in this folder.

    Raises `ConfigError` if the folder holds a run and `resume` is None, holds another number of seeds, or holds no run.
    """
    single, several = has_checkpoint(run_dir), any(map(has_checkpoint, seed_folders(run_dir)))
    if resume is None and any((folder / "metrics.jsonl").exists() for folder in (run_dir, *seed_folders(run_dir))):
        raise ConfigError(
            f"hydra.run.dir: {run_dir} already holds a run; set resume=auto to resume it, or choose another folder"
        )
    if resume is not None and (several if seeds == 1 else single):
        count = len(seed_folders(run_dir)) if several else 1
        held = f"of {count} seeds" if several else "of a single seed"
        raise ConfigError(f"seeds: {run_dir} holds a run {held}, not of {seeds}; set seeds={count}")
    if resume not in (None, "auto") and not (single or several):
        raise ConfigError(f"resume: {run_dir} holds no checkpoint; give the folder of a run that saved one")
    return (single or several) and resume is not None


def has_checkpoint(run_dir: Path) -> bool:
    return bool(steps_in(run_dir / "checkpoints"))


def steps_in(directory: Path) -> list[int]:
    """Numbers of all complete checkpoints, ascending.

    Orbax, which calls a number a step, renames a folder to this number only when the checkpoint is complete.
    """
    if not directory.is_dir():
        return []
    entries = [entry for entry in directory.iterdir() if re.fullmatch("[0-9]{1,18}", entry.name) and entry.is_dir()]
    return sorted(int(entry.name) for entry in entries)


def write_config(run_dir: Path, config: Mapping[str, Any], machine: Mapping[str, Any] | None = None) -> None:
    """Writes `config.yaml`, whose settings fit the checkpoints of the folder, and `machine.json`."""
    settings = json.loads(json.dumps(config, default=list))
    if machine is not None:  # first, because it shows that the folder is that of a run
        write_atomically(run_dir / "machine.json", json.dumps(machine, indent=2) + "\n")
    write_atomically(run_dir / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def discard_start(run_dir: Path) -> None:
    """Deletes the files of a start that failed, so that its folder does not count as the newest run."""
    with contextlib.suppress(OSError):
        if not (run_dir / "metrics.jsonl").exists():
            for name in ("config.yaml", "machine.json", KEPT_MODEL):
                (run_dir / name).unlink(missing_ok=True)
            shutil.rmtree(run_dir / KEPT_TEACHER, ignore_errors=True)


def free_reserve(run_dir: Path) -> None:
    with contextlib.suppress(OSError):
        (run_dir / _RESERVE).unlink(missing_ok=True)


def write_result(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Writes `result.json`: the end of a run, for sweeps and reports."""
    write_atomically(run_dir / _RESULT, json.dumps(result, indent=2, default=str) + "\n")


def write_overrides(run_dir: Path, overrides: Sequence[str]) -> None:
    """Writes `overrides.json`: the overrides of a sweep's job, which has no `result.json` until it ends."""
    with contextlib.suppress(OSError):  # the job itself fails with a clear error if it cannot write its folder
        write_atomically(run_dir / _OVERRIDES, json.dumps(list(overrides), indent=2) + "\n")


def forget_result(run_dir: Path) -> None:
    """Deletes `result.json` of a run that continues."""
    with contextlib.suppress(OSError):
        (run_dir / _RESULT).unlink(missing_ok=True)


def read_result(run_dir: Path) -> dict[str, Any] | None:
    """The content of `result.json`; None if the file is missing or damaged."""
    result = _read(run_dir / _RESULT)
    return result if isinstance(result, dict) else None


def read_overrides(run_dir: Path) -> tuple[str, ...] | None:
    """The overrides of a sweep's job; None if the file is missing or damaged."""
    overrides = _read(run_dir / _OVERRIDES)
    return tuple(map(str, overrides)) if isinstance(overrides, list) else None


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def confirmed_of(run_dir: Path) -> dict[str, Any]:
    """The fields `confirmed_*` of `result.json`; empty if no best policy is confirmed."""
    return {key: value for key, value in (read_result(run_dir) or {}).items() if key.startswith(_CONFIRMED)}


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings in `config.yaml` of a run folder; a `ConfigError` if the file is missing or damaged.

    A folder of compiled programs, which are machine code, is never taken from there.
    """
    path = folder / "config.yaml"
    if not path.exists():
        raise ConfigError(f"run: {folder} is not a run folder, it has no config.yaml; runs are in runs/<env>/<time>")
    try:
        data = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"run: {path} cannot be read: {error.strerror or error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"run: {path} holds no configuration; give another run folder")
    settings = {str(key): value for key, value in data.items()}
    return settings if settings.get("compile_cache") is None else settings | {"compile_cache": "auto"}
