"""The copy of a robot's model in the run folder, so that a run does not depend on the user's files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from rlstable.config import ConfigError
from rlstable.config.robot import NAMED
from rlstable.config.run import EnvConfig
from rlstable.io.files import below, read, write_atomically
from rlstable.io.run_folder import KEPT_MODEL, read_settings, seed_folders, with_kept_model


def taken(env: EnvConfig, resume: str | None, run_dir: Path, report: Callable[[str], None]) -> EnvConfig:
    """The environment of a run that reads the copy in the folder that it resumes, unless `env.xml` is another file.

    A file of the user that has changed since is not read; `report` gets a line about it.
    """
    if resume is None or env.xml is None:
        return env
    folder = run_dir if resume == "auto" else Path(resume)
    for held in (folder, *seed_folders(folder)):
        kept = with_kept_model(env, held)
        if kept.kept_xml is not None and read_settings(held)["env"].get("xml") == env.xml:
            if _has_changed(env.xml, kept.kept_xml):
                report(
                    f"env.xml: {env.xml} has changed since this run started, and the run continues with its "
                    f"copy, {kept.kept_xml}; to continue with the new file, give it another name in env.xml"
                )
            return kept
    return env


def keep(env: EnvConfig, run_dir: Path, event: Callable[..., None]) -> None:
    """Writes the model file of a robot, with all files that it names, into the run folder."""
    xml = env.kept_xml or env.xml
    if xml is None:
        return
    from rlstable.robot.files import bundle

    path, content = below(run_dir, KEPT_MODEL), bundle(xml)
    if not path.is_file() or read(path) != content:
        try:
            write_atomically(path, content)
        except OSError as error:
            raise ConfigError(
                f"hydra.run.dir: cannot write {path}: {error.strerror}; make room there, or choose another folder"
            ) from error
        event("model_kept", file=env.xml, sha256=hashlib.sha256(content).hexdigest())


def _has_changed(xml: str, kept_xml: str) -> bool:
    """Whether a file of the user has other contents than the copy; False for a file that is gone."""
    from rlstable.robot.files import bundle

    with contextlib.suppress(ConfigError, OSError):
        return not xml.startswith(NAMED) and bundle(xml) != read(Path(kept_xml))
    return False
