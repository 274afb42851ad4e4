"""Training from Python: `rlstable.fit` runs the same training as `python -m rlstable.train`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlstable.cli.compose import compose
from rlstable.config import ConfigError
from rlstable.guards.base import MoreGuards
from rlstable.io.run_folder import default_run_dir
from rlstable.runner.loop import TrainingLoop
from rlstable.runner.result import Result
from rlstable.runner.seed_log import Callback

_NO_STRINGS = {"null", "true", "false", "inf", "nan"}


def fit(
    env: str | None = None,
    *,
    run_dir: str | Path | None = None,
    callback: Callback | None = None,
    more_guards: MoreGuards | None = None,
    overrides: Sequence[str] = (),
    **keys: Any,
) -> Result:
    """Trains a policy.

    Args:
        env: A name under `configs/env`, or `package.module:Class` for a class with Brax's Env interface. None selects
            the inverted pendulum, or the environment of the resumed run.
        run_dir: The run folder; None for `runs/<env>/<time>`.
        callback: Called as `callback(step, metrics)` with every logged row; returning True stops the run.
        more_guards: Your own guards, by site (`env`, `batch`, `update`, `state`) and name; see docs/guards.md.
        overrides: More overrides in the syntax of the command, e.g. `["ppo.learning_rate=1e-3"]`.
        **keys: Top-level keys and groups, e.g. `total_steps=1_000_000`, `guards="strict"`, or a mapping for single
            keys of a group, e.g. `ppo={"learning_rate": 1e-3}`.

    Returns:
        The stop reason, metrics, history and policy; with several `seeds` also the result of each seed.

    Raises:
        ConfigError: The configuration is wrong; the message is one line.
    """
    env_words = [] if env is None else ["env=import", f"env.name={env}"] if ":" in env else [f"env={env}"]
    words = [*env_words, *(item for key, value in keys.items() for item in _override(key, value)), *overrides]
    config = compose(words, run_dir)
    if run_dir is None:
        run_dir = default_run_dir(config.resume, config.env.name)
    elif config.resume not in (None, "auto"):
        raise ConfigError("resume: names a folder already, so run_dir is not allowed; omit run_dir or set resume=auto")
    return TrainingLoop(config, run_dir, callback, more_guards).run()


def _override(key: str, value: Any) -> list[str]:
    """A keyword argument as Hydra overrides."""
    if isinstance(value, Mapping):
        return [f"{key}.{name}={_literal(inner)}" for name, inner in value.items()]
    return [f"{key}={_literal(value)}"]


def _literal(value: Any) -> str:
    """A Python value, or one of NumPy's, in Hydra's override grammar."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_literal(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(inner) for inner in value) + "]"
    if isinstance(value, str | Path):
        text = str(value)
        # Without quotes, Hydra would read some strings as a number, a truth value or null.
        plain = re.fullmatch(r"[A-Za-z_./][\w\-./:]*", text) and text.lower() not in _NO_STRINGS
        return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return repr(value)
