"""The copy of a robot's model in the run folder, so that a run does not depend on the user's files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from rlstable.config import Config, ConfigError
from rlstable.config.robot import NAMED
from rlstable.io.files import below, read, write_atomically
from rlstable.io.run_folder import KEPT_MODEL, read_settings, seed_folders, with_kept_model


def taken(config: Config, run_dir: Path, report: Callable[[str], None]) -> Config:
    """The configuration of a run that reads the copy in the folder that it resumes, unless `env.xml` is another file.

    A file of the user that has changed since is not read; `report` gets a line about it.
    """
    if config.resume is None or config.env.xml is None:
        return config
    folder = run_dir if config.resume == "auto" else Path(config.resume)
    for held in (folder, *seed_folders(folder)):
        kept = with_kept_model(config, held)
        if kept.env.kept_xml is not None and read_settings(held)["env"].get("xml") == config.env.xml:
            if _has_changed(config.env.xml, kept.env.kept_xml):
                report(
                    f"env.xml: {config.env.xml} has changed since this run started, and the run continues with its "
                    f"copy, {kept.env.kept_xml}; to continue with the new file, give it another name in env.xml"
                )
            return kept
    return config


def keep(config: Config, run_dir: Path, event: Callable[..., None]) -> None:
    """Writes the model file of a robot, with all files that it names, into the run folder."""
    xml = config.env.kept_xml or config.env.xml
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
        event("model_kept", file=config.env.xml, sha256=hashlib.sha256(content).hexdigest())


def _has_changed(xml: str, kept_xml: str) -> bool:
    """Whether a file of the user has other contents than the copy; False for a file that is gone."""
    from rlstable.robot.files import bundle

    with contextlib.suppress(ConfigError, OSError):
        return not xml.startswith(NAMED) and bundle(xml) != read(Path(kept_xml))
    return False
