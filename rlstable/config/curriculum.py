"""Curricula: a number or a range of a robot's task that changes with the environment steps trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from rlstable.config.schema import Count, Section, validate


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """A value that moves from `start` to `end` while `steps` environment steps are trained."""

    start: Any
    end: Any
    steps: int

    def at(self, share: Any) -> Any:
        """The value after a share of the steps, which may be traced: a number, or the two numbers of a range."""
        if isinstance(self.start, tuple):
            return tuple(low + share * (high - low) for low, high in zip(self.start, self.end, strict=True))
        return self.start + share * (self.end - self.start)


class _Steps(Section):
    steps: Count


@dataclasses.dataclass(frozen=True)
class OrCurriculum:
    """Marks the type of a key that takes a plain value, or the list `[start, end, steps]` with two such values.

    A list, because Hydra cannot replace the list of a range by a mapping.
    """

    plain: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def either(value: object, plain: Callable[[object], Any]) -> object:
            if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 3:
                return plain(value)
            start, end, steps = value
            return Curriculum(plain(start), plain(end), validate(_Steps, {"steps": steps}).steps)

        saved = core_schema.plain_serializer_function_ser_schema(
            lambda value: [value.start, value.end, value.steps] if isinstance(value, Curriculum) else value
        )
        return core_schema.no_info_wrap_validator_function(either, handler(self.plain), serialization=saved)
