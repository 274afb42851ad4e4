"""Configuration of a run with several processes, usually one per host."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from rlstable.config.schema import Count, CountOrZero, Positive, Section, require

# A switch as a word: YAML reads `true` and `false` as truth values.
Word = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)


class DistributedConfig(Section, at="distributed"):
    """Processes that train one run together, connected by `jax.distributed`."""

    enabled: Annotated[Literal["auto", "true", "false"], Word]
    coordinator: str | None
    process_id: CountOrZero | None
    num_processes: Count | None
    timeout: Positive

    @property
    def by_hand(self) -> bool:
        """Whether the user names the processes, instead of a cluster."""
        return any(value is not None for value in (self.coordinator, self.process_id, self.num_processes))

    def _check(self) -> None:
        alone = "false trains in one process, so coordinator, process_id and num_processes must be null"
        require(self.enabled != "false" or not self.by_hand, "enabled", alone)
        named = self.coordinator is None or re.fullmatch(r".+:\d+", self.coordinator)
        require(named, "coordinator", f"{self.coordinator!r} must have the form <host of process 0>:<port>")
        count, number = self.num_processes, self.process_id
        known = number is None or count is None or number < count
        require(known, "process_id", f"{number} must be less than num_processes={count}; the first process is 0")
