"""Numbers for joints by their names or by patterns of names, as in `env.task.home`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from rlstable.config import ConfigError


def by_joint(key: str, numbers: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """The number of each joint that a pattern matches, by name; of several patterns the first one counts.

    Raises `ConfigError` if a pattern matches no joint.
    """
    names = [*names]
    found: dict[str, float] = {}
    for pattern, number in numbers.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigError(f"{key}: the model has no joint {pattern!r}; it has {', '.join(names)}")
        found = dict.fromkeys(matched, number) | found
    return found
