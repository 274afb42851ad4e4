"""Opens a run folder to use its policy: reads the configuration of the training and loads the policy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from rlstable import config as typed
from rlstable.compilation.xla import check_flags, disable_async_dispatch
from rlstable.config import Config, ConfigError
from rlstable.config.schema import expand_home
from rlstable.device.precision import Level
from rlstable.io.kept_model import with_kept_model
from rlstable.io.run_folder import read_settings, require_one_seed
from rlstable.io.versions import versions
from rlstable.policy.policy import Policy, load_policy

Which = Literal["best", "latest"] | int


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run and one of its policies.

    `config` takes the precision level and the physics backend with which the policy was saved.
    """

    folder: Path
    config: Config
    policy: Policy
    trust: bool = False  # whether the user trusts the code that the folder names

    def __post_init__(self) -> None:
        host, env = self.policy.host, self.config.env
        if env.backend == "auto" and host.get("backend"):
            env = env.model_copy(update={"backend": host["backend"]})
        level = dict(zip(Level._fields, host.get("level", ()), strict=False))
        object.__setattr__(self, "config", self.config.with_precision(level, env=env))

    @property
    def iteration(self) -> int:
        return int(self.policy.host["host"]["iteration"])

    @property
    def step(self) -> int:
        return int(self.policy.host["step"])

    @property
    def checkpoint(self) -> str:
        """Iteration and step of the policy's checkpoint, for messages."""
        confirmed = ", the confirmed best" if "confirmed_return" in self.policy.host else ""
        return f"checkpoint of iteration {self.iteration:,}, step {self.step:,}{confirmed}"


def open_run(folder: str | Path, which: Which = "best", trust: bool = False) -> SavedRun:
    """Opens a finished, running or interrupted run, without importing or calling code that the folder names.

    `which` is as for `rlstable.load_policy`; `trust` is for the code of a folder that another user owns. Raises
    `ConfigError` without a run or a checkpoint that can be read, or if a flag of JAX is unusable.
    """
    check_flags()
    # Must run before JAX is initialised, that is before the policy's arrays exist: native physics needs the flag.
    disable_async_dispatch()
    folder = expand_home(folder)
    require_one_seed(folder)
    settings = read_settings(folder)
    try:
        config = typed.load({**settings, "fault": {}})
        config = config.model_copy(update={"env": with_kept_model(config.env, folder)})
    except ConfigError as error:
        raise ConfigError(
            f"run: {folder / 'config.yaml'} is not of this version, rlstable {versions()['rlstable']}: {error}"
        ) from error
    return SavedRun(folder, config, load_policy(folder, which), trust)
