"""Training from Python: `rlstable.fit` runs the same training as `python -m rlstable.train`."""

from __future__ import annotations

import builtins
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.cli.selection import overrides_for
from rlstable.config import ConfigError, recipes
from rlstable.envs.objects import Environments
from rlstable.listeners import listeners_of
from rlstable.ppo.guards import MoreGuards
from rlstable.runner.listener import Listener
from rlstable.runner.log import Callback
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def fit(
    env: Any = None,
    *,
    run_dir: str | Path | None = None,
    callback: Callback | None = None,
    more_guards: MoreGuards | None = None,
    listeners: Sequence[Listener] = (),
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Result:
    """Trains a policy.

    Args:
        env: A name under `configs/env`, `playground:<task>`, `gymnasium:<task>`, `package.module:Class` for a class
            with Brax's Env interface, an environment object, or a mapping with keys of the group `env`. None selects
            the inverted pendulum, or the environment of the resumed run.
        run_dir: The run folder; None for `runs/<env>/<time>`. With `resume=<folder>` it continues a copy of that run.
        callback: Called as `callback(step, row)` with every logged row; returning True stops the run. With several
            seeds it gets the rows of each, with the key `seed`.
        more_guards: Your own guards, by site (`env`, `batch`, `update`, `state`) and name; see docs/guards.md.
        listeners: Objects that watch the run, beside its pages; see `Listener`.
        overrides: More overrides in the syntax of the command, e.g. `["ppo.learning_rate=1e-3"]`.
        **keys: Top-level keys and groups, e.g. `total_steps=1_000_000`, `guards="strict"`, or a mapping for single
            keys of a group, e.g. `ppo={"learning_rate": 1e-3}`.

    Returns:
        The stop reason, metrics, history and policy; with several `seeds` the policy of the best one, and the result
        of each seed.

    Raises:
        ConfigError: The configuration is wrong; the message is one line.
        KeyboardInterrupt: After Ctrl-C, once the run is saved. In a notebook the result is returned instead, and its
            stop reason says so. Another signal ends the process once the run is saved.
    """
    if run_dir is not None and not str(run_dir).strip():
        raise ConfigError("run_dir: has no value; give a folder, or leave it out")
    if named := next((word for word in overrides if word.lstrip("+~").startswith("hydra.")), None):
        raise ConfigError(f"overrides: {named} has no effect in Python; give fit(run_dir=<folder>) instead")
    selected, given = overrides_for(env, keys)
    words = [*selected, *overrides]
    config = compose(words)
    if config.resume is None and config.logging.console != "off":
        print(recipes.notice(words, config.recipe_for), flush=True)
    environments = None if given is None else Environments(given, given)
    loop = TrainingLoop(
        config,
        run_dir,
        callback,
        more_guards,
        environments=environments,
        listeners=[*listeners, *listeners_of(config.render, config.logging)],
    )
    result = loop.run()
    if loop.received_signal in _ENDING and not hasattr(builtins, "__IPYTHON__"):
        # The run is saved. Now the signal does what it does to any program, so that a loop over seeds ends too.
        signal.raise_signal(loop.received_signal)
    return result
