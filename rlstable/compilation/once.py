"""Cache of compiled programs shared by all seeds of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rlstable.config import Config

Built = TypeVar("Built")


class SharedBuilds(Generic[Built]):
    """Builds one object per configuration; configurations that differ only in the seed share one object.

    Args:
        build: Called with a configuration and the arguments that all seeds share.
    """

    def __init__(self, build: Callable[..., Built]):
        self._build = build
        self._built: dict[str, Built] = {}

    def __call__(self, config: Config, *args: Any) -> Built:
        """The object for a configuration, built at the first call."""
        key = config.model_dump_json(exclude={"seed", "logging", "resume"})
        if key not in self._built:
            self._built[key] = self._build(config, *args)
        return self._built[key]
