"""Training from Python: `rlstable.fit` runs the same training as `python -m rlstable.train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlstable.cli.compose import compose
from rlstable.config import recipes
from rlstable.config.overrides import is_mapping
from rlstable.config.overrides import overrides as overrides_of
from rlstable.envs.objects import Environments, name_of
from rlstable.guards.base import MoreGuards
from rlstable.runner.log import Callback
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.seeds import Result

_PLAYGROUND = "playground:"


def fit(
    env: Any = None,
    *,
    run_dir: str | Path | None = None,
    callback: Callback | None = None,
    more_guards: MoreGuards | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Result:
    """Trains a policy.

    Args:
        env: A name under `configs/env`, `playground:<task>`, `package.module:Class` for a class with Brax's Env
            interface, an environment object, or a mapping with keys of the group `env`. None selects the inverted
            pendulum, or the environment of the resumed run.
        run_dir: The run folder; None for `runs/<env>/<time>`. With `resume=<folder>` it continues a copy of that run.
        callback: Called as `callback(step, row)` with every logged row; returning True stops the run. With several
            seeds it gets the rows of each, with the key `seed`.
        more_guards: Your own guards, by site (`env`, `batch`, `update`, `state`) and name; see docs/guards.md.
        overrides: More overrides in the syntax of the command, e.g. `["ppo.learning_rate=1e-3"]`.
        **keys: Top-level keys and groups, e.g. `total_steps=1_000_000`, `guards="strict"`, or a mapping for single
            keys of a group, e.g. `ppo={"learning_rate": 1e-3}`.

    Returns:
        The stop reason, metrics, history and policy; with several `seeds` the policy of the best one, and the result
        of each seed.

    Raises:
        ConfigError: The configuration is wrong; the message is one line.
    """
    if is_mapping(env):
        settings = dict(env.items())
        env, keys = settings.pop("name", None), {**keys, "env": settings}
    words = [*_env_words(env), *(item for key, value in keys.items() for item in overrides_of(key, value)), *overrides]
    config = compose(words)
    if config.resume is None and config.logging.console != "off":
        print(recipes.notice(words, config.recipe_for), flush=True)
    environments = None if env is None or isinstance(env, str) else Environments(env, env)
    return TrainingLoop(config, run_dir, callback, more_guards, environments=environments).run()


def _env_words(env: Any) -> list[str]:
    """The overrides that select an environment."""
    if env is None:
        return []
    if not isinstance(env, str):
        return ["env=import", "env.source=object", f"env.name={name_of(env)}", "env.backend=null"]
    if env.startswith(_PLAYGROUND):
        return ["env=playground", f"env.name={env.removeprefix(_PLAYGROUND)}"]
    return ["env=import", f"env.name={env}"] if ":" in env else [f"env={env}"]
