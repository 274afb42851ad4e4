"""Options shared by the commands that use a trained policy: run, checkpoint and environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlstable.config.schema import Flag, Integer, KeyedError, Section, Seed


class PolicyOptions(Section):
    """Selects a run and one of its policies."""

    run: Path = Field(description="folder of the run, runs/<env>/<time>")
    which: Literal["best", "latest"] | Annotated[Integer, Field(ge=0)] = Field(
        "best", description="checkpoint of the run: best (confirmed, else by evaluation), latest, or an iteration"
    )


class PlayOptions(PolicyOptions):
    """Selects a policy and how it is played."""

    deterministic: Flag = Field(True, description="true plays the mean action, false samples")
    backend: Literal["auto", "native", "mjx", "spring", "generalized", "positional"] | None = Field(
        None, description="physics: auto, native, mjx, spring, generalized, positional, null for the training's physics"
    )
    seed: Seed = Field(0, description="seed of the initial states and the samples")
    trust: Flag = Field(
        False, description="true, once, for a run folder of another user that names Python code; read that code first"
    )


def require_folder(out: Path | None) -> None:
    """Checks that an output path is not a file.

    Raises:
        KeyedError: The path is a file.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise KeyedError("out", f"{out} is a file; give a folder")
