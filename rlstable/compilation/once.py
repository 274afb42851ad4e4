"""Cache of compiled programs shared by all seeds of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from rlstable.config import Config

Built = TypeVar("Built")


class SharedBuilds(Generic[Built]):
    """Builds of one kind, one for each configuration that does not differ in its seed alone.

    Args:
        build: Makes one, from a configuration and what the seeds have in common.
    """

    def __init__(self, build: Callable[..., Built]):
        self._build = build
        self._built: dict[str, Built] = {}

    def __call__(self, config: Config, *args: Any) -> Built:
        """The one for a configuration."""
        key = config.model_dump_json(exclude={"seed", "logging", "resume"})
        if key not in self._built:
            self._built[key] = self._build(config, *args)
        return self._built[key]
