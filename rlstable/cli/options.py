"""Keys shared by the commands about a trained policy: the run, the checkpoint, and the environment to play."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlstable.config.schema import Flag, Integer, KeyedError, Section, Seed


class PolicyOptions(Section):
    """Which policy of which run."""

    run: Path = Field(description="folder of the run, runs/<env>/<time>")
    which: Literal["best", "latest"] | Annotated[Integer, Field(ge=0)] = Field(
        "best", description="its checkpoint: best (confirmed, else by evaluation), latest, or an iteration"
    )


class PlayOptions(PolicyOptions):
    """A policy, and how it is played."""

    deterministic: Flag = Field(True, description="true plays the mean action, false samples")
    backend: Literal["auto", "native", "mjx", "spring", "generalized", "positional"] | None = Field(
        None, description="physics: auto, native, mjx, spring, generalized, positional, null for that of the training"
    )
    seed: Seed = Field(0, description="of the first states and the samples")
    trust: Flag = Field(
        False, description="true, once, for a run folder of another user that names Python code; read that code first"
    )


def require_folder(out: Path | None) -> None:
    """Checks that files can go into what was named for them.

    Raises:
        KeyedError: It is a file.
    """
    if out is not None and out.exists() and not out.is_dir():
        raise KeyedError("out", f"{out} is a file; give a folder")
