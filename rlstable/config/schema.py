"""Building blocks of the configuration: validated numbers, frozen sections and one-line errors."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeGuard, TypeVar, get_args

import pydantic
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from rlstable.config.defaults import defaults


class ConfigError(ValueError):
    """A mistake in the configuration: one line with the key, the allowed values and how to fix it."""


def _number(value: object) -> object:
    """Rejects `True` and "3", which Pydantic would convert to 1 and 3."""
    if isinstance(value, bool):
        raise ValueError(f"{value!r} must be a number, not a boolean")
    if isinstance(value, str):
        raise ValueError(f"{value!r} must be a number, not text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} must be a finite number")
    return value


def _whole(value: object) -> object:
    """Converts a whole float: YAML reads 3e7 as a float, and Pydantic accepts whole floats only up to 2**63."""
    value = _number(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Names of other frameworks, and the last parts of the keys that mean the same.
_OTHER_NAMES = {
    "lr": "learning_rate",
    "gamma": "discounting",
    "n_envs": "num_envs",
    "steps": "total_steps",
    "timesteps": "total_steps",
    "total_timesteps": "total_steps",
    "num_timesteps": "total_steps",
    "num_seeds": "seeds",
    "seed_count": "seeds",
}

# Larger numbers overflow float32 or an int32 index.
_FLOAT32_MAX, INT32_MAX = 3.4028234663852886e38, 2**31 - 1


Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False, ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)]
Positive = Annotated[Finite, Field(gt=0)]
NonNegative = Annotated[Finite, Field(ge=0)]
Share = Annotated[Finite, Field(ge=0, le=1)]
Integer = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Integer, Field(gt=0, le=INT32_MAX)]
CountOrZero = Annotated[Integer, Field(ge=0, le=INT32_MAX)]
Total = Annotated[Integer, Field(gt=0, lt=2**64)]  # the limit of the step counter
Seed = Annotated[Integer, Field(ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]


def expand_home(path: str | Path) -> Path:
    """A path as typed; `~` is the home folder."""
    return Path(os.path.expanduser(path))


# Fields of a configuration, and of the arguments of a command.
Folder = Annotated[Path, AfterValidator(expand_home)]
FolderName = Annotated[str, Field(min_length=1), AfterValidator(lambda path: str(expand_home(path)))]


class Section(BaseModel):
    """Base of all sections: frozen, rejects unknown keys, and fills missing keys with defaults from `configs/`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    at: ClassVar[str | None] = None  # dotted key, empty for the whole configuration; None without defaults

    def __init_subclass__(cls, at: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.at = at

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: object) -> object:
        if cls.at is None or not isinstance(data, Mapping):
            return data
        sections: dict[str, object] = {
            name: {} for name, field in cls.model_fields.items() if _is_section(field.annotation)
        }
        return {**defaults(cls.at), **sections, **data}

    def _check(self) -> None:
        """Raises `KeyedError` for settings that do not fit each other."""

    @model_validator(mode="after")
    def _checked(self) -> Self:
        self._check()
        return self


class KeyedError(ValueError):
    """An error about one key, raised by the validator of a whole section."""

    def __init__(self, key: str, message: str):
        super().__init__(message)
        self.key = key


def require(accepted: object, key: str, message: str) -> None:
    """Raises KeyedError with the message about a key of the section unless the settings are accepted."""
    if not accepted:
        raise KeyedError(key, message)


Model = TypeVar("Model", bound=Section)


def validate(model: type[Model], data: Mapping[str, object]) -> Model:
    """Builds a section from plain nested data; ConfigError names the first mistake in one line."""
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(_one_line(model, error)) from None


def unknown_key(model: type[Section], key: str) -> ConfigError:
    return ConfigError(f"{key}: unknown key{_suggest(model, key.split('.'))}")


def keys_named(model: type[Section], name: str) -> list[str]:
    """The dotted keys whose last part is a name, or the name that other frameworks use for the key."""
    name = _OTHER_NAMES.get(name, name)
    return [key for key in _keys(model) if key.rpartition(".")[2] == name]


def _keys(model: type[Section]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        if _is_section(field.annotation):
            yield from (f"{name}.{key}" for key in _keys(field.annotation))


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the type of an error without text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def divisors(value: int) -> list[int]:
    """All divisors, unsorted."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in small)]


def nearest(value: int, choices: list[int]) -> int:
    """The choice nearest to a value; the smaller one of two equally near choices."""
    return min(choices, key=lambda choice: (abs(choice - value), choice))


def _is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


def _one_line(model: type[Section], error: pydantic.ValidationError) -> str:
    """The first mistake of a validation error as one line: `key: mistake; allowed values`."""
    details = error.errors()
    first = details[0]
    # Pydantic adds the union member that it tried, which is not a key. A number for all joints has the pattern *.
    path = [str(part) for part in first["loc"] if not str(part).startswith(("literal[", "*"))]
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
    elif first["type"] == "tuple_type":
        message = f"must be a list, [a, b], got {first['input']!r}"
    else:
        message = first["msg"][0].lower() + first["msg"][1:] + f", got {first['input']!r}"
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{'.'.join(path) or 'config'}: {message}{more}"


def _suggest(model: type[Section], path: list[str]) -> str:
    """Suggests a key for the first unknown part of a dotted key."""
    section = model
    for depth, part in enumerate(path):
        field = section.model_fields.get(part)
        if field is None:
            keys = list(section.model_fields)
            named = keys_named(model, path[-1])
            close = (
                [key for key in named if key.split(".")[:depth] == path[:depth]]
                or named
                or difflib.get_close_matches(part, keys, n=1)
                or [key for name in _close_names(model, path[-1]) for key in keys_named(model, name)]
            )
            if close or not keys:
                return f"; did you mean {' or '.join(close[:3])}?" if close else ""
            return f"; allowed here: {', '.join(keys)}"
        sections = [kind for kind in (field.annotation, *get_args(field.annotation)) if _is_section(kind)]
        if not sections:
            return f"; {part} is a value, not a section" if path[depth + 1 :] else "; the environment has none"
        section = sections[0]
    return ""


def _close_names(model: type[Section], name: str) -> list[str]:
    return difflib.get_close_matches(name, {key.rpartition(".")[2] for key in _keys(model)}, n=1, cutoff=0.8)
