"""Options shared by the commands that use a trained policy: run, checkpoint and environment."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rlstable.config.schema import ConfigError, Flag, Folder, Integer, Section, Seed, expand_home

LATEST = Path("latest")


def latest_run(one_seed: bool = False) -> Path:
    """The newest run folder under `runs`, or that of its best seed, which it prints; a `ConfigError` without a run."""
    from rlstable.io.run_folder import best_seed, newest_run

    run = newest_run()
    if run is None:
        raise ConfigError("there is no run in the folder runs yet; make one with rlstable train, or name a folder")
    best = best_seed(run) if one_seed else None
    print(f"run: {best or run}, {'the best seed of ' * (best is not None)}the newest run", file=sys.stderr)
    return best or run


def found_run(folder: Path, one_seed: bool = False) -> Path:
    """The folder that `run=` names, or the newest one for `latest`; see `latest_run`."""
    return latest_run(one_seed) if folder == LATEST else expand_home(folder)


def _no_file(out: Path) -> Path:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give a folder")
    return out


OutFolder = Annotated[Folder, AfterValidator(_no_file)]


class PolicyOptions(Section):
    """Selects a run and one of its policies."""

    run: Annotated[Path, AfterValidator(functools.partial(found_run, one_seed=True))] = Field(
        LATEST, validate_default=True, description="folder of the run, runs/<env>/<time>; latest, the newest in runs"
    )
    which: Literal["best", "latest"] | Annotated[Integer, Field(ge=0)] = Field(
        "best", description="checkpoint of the run: best (confirmed, else by evaluation), latest, or a number"
    )


class PlayOptions(PolicyOptions):
    """Selects a policy and how it is played."""

    deterministic: Flag = Field(True, description="true plays the mean action, false samples")
    backend: Literal["auto", "native", "mjx", "spring", "generalized", "positional"] | None = Field(
        None, description="physics: auto, native, mjx, spring, generalized, positional, null for the training's physics"
    )
    seed: Seed = Field(0, description="seed of the initial states and the samples")
    trust: Flag = Field(
        False, description="true to run the Python code that another user's run folder names; read that code first"
    )
