"""The copy of a robot's model in the run folder, so that a run does not depend on the user's files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.config.robot import NAMED
from rlstable.config.run import EnvConfig
from rlstable.io.files import below, read, write_atomically
from rlstable.io.run_folder import KEPT_MODEL, read_settings, resumed_folders


def with_kept_model(env: EnvConfig, run_dir: Path) -> EnvConfig:
    """The environment of a run, which reads the copy in its folder, if there is one."""
    path = run_dir / KEPT_MODEL
    return env if env.xml is None or not path.is_file() else env.with_model_file(str(path))


def resumed_env(env: EnvConfig, resume: str | None, run_dir: Path, report: Callable[[str], None]) -> EnvConfig:
    """The environment of a run that reads the copy in the folder that it resumes, unless `env.xml` is another file.

    A file of the user that has changed since is not read; `report` gets a line about it.
    """
    for held in resumed_folders(resume, run_dir):
        kept = with_kept_model(env, held)
        if kept is not env and read_settings(held)["env"].get("xml") == env.xml:
            with contextlib.suppress(ConfigError, OSError):  # the user's file is gone
                if not str(env.xml).startswith(NAMED) and _bundle(env) != read(Path(kept.model_file)):
                    report(
                        f"env.xml: {env.xml} has changed since this run started, and the run continues with its "
                        f"copy, {kept.model_file}; to continue with the new file, give it another name in env.xml"
                    )
            return kept
    return env


def keep(env: EnvConfig, run_dir: Path) -> None:
    """Writes the model file of a robot, with all files that it names, into the run folder."""
    if env.xml is None:
        return
    path, content = below(run_dir, KEPT_MODEL), _bundle(env)
    if not path.is_file() or read(path) != content:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir: cannot write {path}: {error.strerror}; make room there, or choose another folder"
            ) from error


def _bundle(env: EnvConfig) -> bytes:
    from rlstable.robot.files import bundle

    return bundle(env.model_file)
