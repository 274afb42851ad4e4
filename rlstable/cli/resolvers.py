"""Rejects OmegaConf resolvers such as `${oc.env:NAME}` in settings.

A resolver runs a function when the settings are read. Its result, for example a secret, would be saved in
`config.yaml`, in the report and in every checkpoint. References to other keys, `${ppo.num_envs}`, are no resolvers.
`${rlstable.playground:<key>}` is allowed at this key, as `configs/` has it: its result is a number of Playground.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from rlstable.config.schema import ConfigError

# The keys that `${rlstable.playground:<key>}` reads.
_RESOLVED_FROM = ("env.name", "env.impl")


def reject_resolvers(settings: Mapping[str, Any], file: str | None = None) -> None:
    """Raises ConfigError for the first value of unresolved `settings` with a resolver: a colon behind `${`.

    `file` is the file with the settings; None for settings composed for this command.
    """
    for key, text in _texts(settings, ""):
        of_playground = text == f"${{rlstable.playground:{key}}}" and key not in _RESOLVED_FROM
        if not re.search(r"\$\{.*:", text, re.DOTALL) or (file is None and of_playground):
            continue
        if file is not None:
            raise ConfigError(f"run: {file} has the resolver {text!r} at {key}; write the value instead")
        raise ConfigError(
            f"{key}: the resolver {text!r} is rejected, because its value would be saved in config.yaml, report and "
            "checkpoints; keep a secret in an environment variable that your code or wandb (WANDB_API_KEY) reads, "
            f'and write any other value itself, e.g. {key}="$NAME" in a shell'
        )


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """All strings of nested data, with their dotted keys."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{key}[{index}]")
