"""Building blocks of the configuration: checked numbers, frozen models, errors of one line.

An error names the key, the allowed values and how to mend the mistake.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlstable.config.defaults import defaults


class ConfigError(ValueError):
    """A mistake in the configuration: one line that names the key, the allowed values and how to mend the mistake."""


def _number(value: Any) -> Any:
    """Pydantic takes `True` for 1 and "3" for 3; a configuration that says so is a mistake."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is a truth value where a number is asked")
    if isinstance(value, str):
        raise ValueError(f"{value!r} is text where a number is asked")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} stands where a finite number is asked")
    return value


def _whole(value: Any) -> Any:
    """Converts a whole float: YAML reads 3e7 as a float, and Pydantic accepts such a float only up to 2**63."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


# A larger number is infinite in float32, or no int32 index.
_FLOAT32_MAX, _INT32_MAX = 3.4028234663852886e38, 2**31 - 1


Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False, ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)]
Positive = Annotated[Finite, Field(gt=0)]
NonNegative = Annotated[Finite, Field(ge=0)]
Share = Annotated[Finite, Field(ge=0, le=1)]
Integer = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Integer, Field(gt=0, le=_INT32_MAX)]
CountOrZero = Annotated[Integer, Field(ge=0, le=_INT32_MAX)]
Total = Annotated[Integer, Field(gt=0)]
Seed = Annotated[Integer, Field(ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]


class Section(BaseModel):
    """Base of every section: frozen, an unknown key is an error, a missing key has its default from `configs/`.

    Attributes:
        at: Dotted key of the section, empty for the whole configuration; None if the section has no defaults.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    at: ClassVar[str | None] = None

    def __init_subclass__(cls, at: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.at = at

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if cls.at is None or not isinstance(data, Mapping):
            return data
        sections: dict[str, Any] = {
            name: {} for name, field in cls.model_fields.items() if _is_section(field.annotation)
        }
        return {**defaults(cls.at), **sections, **data}


class KeyedError(ValueError):
    """A complaint about one key of a section, raised inside a whole-section validator."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


Model = TypeVar("Model", bound=Section)


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """Builds a model from plain nested data.

    Raises:
        ConfigError: The first mistake, in one line.
    """
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(model, error)) from None


def unknown_key(model: type[Section], key: str) -> ConfigError:
    """The error for a dotted key that no section has."""
    return ConfigError(f"{key}: unknown key{_suggest(model, key.split('.'))}")


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def divisors(value: int) -> list[int]:
    """Every divisor, in no order."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in small)]


def nearest(value: int, choices: list[int]) -> int:
    """The choice to suggest in the place of a value; the smaller one of two."""
    return min(choices, key=lambda choice: (abs(choice - value), choice))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _one_line(model: type[Section], error: pydantic.ValidationError) -> str:
    """The first mistake of a validation error as `key: mistake; allowed values`."""
    details = error.errors()
    first = details[0]
    # Pydantic adds the member of a union that it tried, which is no key.
    path = [str(part) for part in first["loc"] if not str(part).startswith("literal[")]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, KeyedError):
        path.append(cause.key)
        message = str(cause)
    elif isinstance(cause, ValueError):
        message = str(cause)
    elif first["type"] == "missing":
        message = "is missing; set it"
    elif first["type"] == "extra_forbidden":
        message = "unknown key" + _suggest(model, path)
    else:
        message = first["msg"][0].lower() + first["msg"][1:] + f", got {first['input']!r}"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{'.'.join(path) or 'config'}: {message}{more}"


def _suggest(model: type[Section], path: list[str]) -> str:
    """Suggests a key for the first part of an unknown key that no section has."""
    section: Any = model
    for part in path:
        field = section.model_fields.get(part)
        if field is None:
            keys = list(section.model_fields)
            close = difflib.get_close_matches(part, keys, n=1)
            return f"; did you mean {close[0]}?" if close else f"; allowed here: {', '.join(keys)}"
        if not _is_section(field.annotation):
            return f"; {part} has no keys of its own"
        section = field.annotation
    return ""
