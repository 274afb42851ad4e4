"""A run folder, opened to use its policy: the configuration it was trained with, and what it learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rlstable import config as typed
from rlstable.cli.resolvers import reject_resolvers
from rlstable.compilation.xla import disable_async_dispatch
from rlstable.config import Config, ConfigError
from rlstable.io.run_folder import read_settings, require_one_seed
from rlstable.io.versions import versions
from rlstable.policy import Policy, load_policy
from rlstable.supervise.ladder import Level

Which = Literal["best", "latest"] | int


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run and one of its policies.

    Attributes:
        folder: Of the run.
        config: As it was trained when this policy was saved, at the precision it had climbed to and on the physics that
            was chosen for it; without the fault it may have been given on purpose.
        policy: What it learnt.
        trust: Whether the user agrees to run the code that the folder names.
    """

    folder: Path
    config: Config
    policy: Policy
    trust: bool = False

    @property
    def iteration(self) -> int:
        """At which the policy was saved."""
        return int(self.policy.host["host"]["iteration"])

    @property
    def step(self) -> int:
        """Environment steps that it was trained for."""
        return int(self.policy.host["step"])

    @property
    def checkpoint(self) -> str:
        """Iteration and step of the policy's checkpoint, for messages."""
        confirmed = ", the confirmed best" if "confirmed_return" in self.policy.host else ""
        return f"checkpoint of iteration {self.iteration:,}, step {self.step:,}{confirmed}"

    def config_on(self, backend: str | None) -> Config:
        """The configuration on another physics; the same where `backend` is None."""
        if backend is None:
            return self.config
        env = self.config.env.model_copy(update={"backend": backend})
        return self.config.model_copy(update={"env": env})


def open_run(folder: str | Path, which: Which = "best", trust: bool = False) -> SavedRun:
    """Opens a run, also a running or interrupted one. Nothing that the folder names is imported or called.

    Args:
        folder: The run folder.
        which: As for `rlstable.load_policy`.
        trust: Whether the environment may be made from code that the folder names, if another user made the folder.

    Raises:
        ConfigError: No run is there, it was never saved, its checkpoint cannot be read, or its configuration is of
            another version.
    """
    # Before the policy's arrays are jax's first, after which it does not listen: what plays it may be native physics.
    disable_async_dispatch()
    folder = Path(folder)
    require_one_seed(folder)
    config = read_config(folder)
    if not (folder / "checkpoints").is_dir():
        raise ConfigError(f"run: {folder} has no checkpoint; nothing was saved before it ended, or checkpoint=off")
    policy = load_policy(folder, which)
    return SavedRun(folder, _as_trained(config, policy.host), policy, trust)


def _as_trained(config: Config, host: Mapping[str, Any]) -> Config:
    """A configuration with what the run came to by itself, by what was saved beside its policy."""
    level = dict(zip(Level._fields, host.get("level", ()), strict=False))
    env = {"backend": host.get("backend")} if config.env.backend == "auto" and host.get("backend") else {}
    return config.model_copy(
        update={
            "precision": config.precision.model_copy(update=level),
            "env": config.env.model_copy(update=env),
        }
    )


def read_config(folder: Path) -> Config:
    """The configuration that a run folder holds.

    Raises:
        ConfigError: No run is there, it was configured for another version, or a value has a resolver.
    """
    data = read_settings(folder)
    reject_resolvers(data, str(folder / "config.yaml"))
    try:
        return typed.load({**data, "fault": {}})
    except ConfigError as error:
        raise ConfigError(
            f"run: {folder / 'config.yaml'} is not of this version, rlstable {versions()['rlstable']}: {error}"
        ) from error
