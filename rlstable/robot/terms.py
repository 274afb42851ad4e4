"""Finds the function of a term, checks its parameters, and says which parts of the model it needs.

A term is a pure function. Its parameters are the keyword-only arguments, with their types; a default in the signature
makes a parameter optional.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
from pydantic import create_model

from rlstable.compilation import sources
from rlstable.config import ConfigError
from rlstable.config.curriculum import Curriculum
from rlstable.config.robot import TermConfig
from rlstable.config.schema import Section, first_line, validate
from rlstable.robot.model import Robot

Function = TypeVar("Function", bound=Callable[..., Any])
Terms = Mapping[str, Callable[..., Any]]

_REASONS = {
    "base": "needs a root body that moves, by a free joint (env.task.free_base=true adds one) or slide joints, and "
    "this model's base is fixed",
    "joints": "needs a hinge or slide joint, and this model has none",
    "terrain": "needs uneven ground; choose env=robot_rough, or add env.task.terrain",
    "feet": "needs feet, geoms that can collide and touch the floor at home, and this model has none",
}


def needs(*parts: str) -> Callable[[Function], Function]:
    """Declares needs: `base`, `joints`, `feet`, `terrain`, `accelerometer`, `truncation`, `command <name>`."""

    def declare(function: Function) -> Function:
        function.needs = parts  # type: ignore[attr-defined]
        return function

    return declare


def mirrors(kind: str) -> Callable[[Function], Function]:
    """Declares how the mirror image of a term's vector follows from the vector, for `ppo.symmetry`.

    - `vector`: a position or velocity; `axial`: an angular velocity; `scalar`: numbers that stay
    - `joints`, `action` or `feet`: a number for each of them
    - for terms of rlstable: `directions`, `command`, `velocity_command`, `clock`, `grid`, `site`, `sensor`,
      `gyro`, `accelerometer`, `contact`
    """

    def declare(function: Function) -> Function:
        function.mirror_rule = kind  # type: ignore[attr-defined]
        return function

    return declare


def mirror_rule_of(function: Callable[..., Any]) -> str | None:
    return getattr(function, "mirror_rule", None)


def needs_of(function: Callable[..., Any]) -> tuple[str, ...]:
    return getattr(function, "needs", ())


def truncates(function: Callable[..., Any]) -> bool:
    """Whether an ending is a truncation: the episode could go on."""
    return "truncation" in needs_of(function)


def by_name(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """A list of terms: functions by name."""
    return {function.__name__: function for function in functions}


def found(terms: Terms, key: str, configs: Mapping[str, TermConfig]) -> dict[str, Callable[..., Any]]:
    """The functions of a list of the configuration at `key`, by name, with their parameters."""
    return {name: _bound(terms, f"{key}.{name}", config.path(name), config) for name, config in configs.items()}


def _bound(terms: Terms, key: str, path: str, config: TermConfig) -> Callable[..., Any]:
    function = _function(terms, key, path)
    try:
        values = validate(_parameters(function), config.parameters)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from None
    bound = functools.partial(function, **{name: getattr(values, name) for name in type(values).model_fields})
    return needs(*needs_of(function))(functools.wraps(function)(bound))


def _function(terms: Terms, key: str, path: str) -> Callable[..., Any]:
    if ":" in path:
        function = sources.imported(path, key)
        if not callable(function):
            raise ConfigError(f"{key}: {path} is no function")
        return typing.cast("Callable[..., Any]", function)
    if path not in terms:
        close = difflib.get_close_matches(path, terms, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(sorted(terms))}"
        raise ConfigError(f"{key}: there is no term {path!r}; {hint} (a function of your own: package.module:function)")
    return terms[path]


@functools.cache
def _parameters(function: Callable[..., Any]) -> type[Section]:
    """The keyword-only arguments of a term as a section of the configuration."""
    kinds = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {
        name: (kinds.get(name, Any), ... if argument.default is inspect.Parameter.empty else argument.default)
        for name, argument in inspect.signature(function).parameters.items()
        if argument.kind is inspect.Parameter.KEYWORD_ONLY
    }
    return create_model(function.__name__, __base__=Section, **fields)


def parameters_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a term with their defaults, or `...` without one, for a page about the terms."""
    fields = _parameters(function).model_fields
    return {name: ... if field.is_required() else field.default for name, field in fields.items()}


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a term of the configuration, with their values."""
    return getattr(function, "keywords", {})


def touching(functions: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Names of geoms and bodies whose contacts the terms read, and the key of the parameter `geoms` that has it."""
    return {name: f"{key}.geoms" for key, f in functions.items() for name in arguments(f).get("geoms", ())}


def sites(functions: Mapping[str, Callable[..., Any]]) -> set[str]:
    """Names of sites, or of bodies, whose positions the terms read, from their parameter `site`; empty for null."""
    read = (arguments(function) for function in functions.values())
    return {parameters["site"] or "" for parameters in read if "site" in parameters}


def check_needs(robot: Robot, key: str, functions: Mapping[str, Callable[..., Any]], commands: Terms) -> None:
    """Raises ConfigError for the first term that needs what the model or the task lacks."""
    has = {"base": robot.moves, "joints": robot.joints, "feet": robot.feet, "terrain": robot.terrain}
    for name, function in functions.items():
        for need in needs_of(function):
            kind, _, command = need.partition(" ")
            if kind == "command" and command not in commands:
                raise ConfigError(f"{key}.{name}: needs the command {command}; add env.task.commands.{command}")
            if kind in has and not has[kind]:
                raise ConfigError(f"{key}.{name}: {_REASONS[kind]}; remove the term: {key}.{name}=null")


def grown(value: Any, trained: Any) -> Any:
    """A value of the configuration after this number of steps trained; a curriculum's value then."""
    if not isinstance(value, Curriculum):
        return value
    return value.at(jnp.clip(jnp.asarray(trained, jnp.float32) / value.steps, 0.0, 1.0))


def has_curriculum(function: Callable[..., Any]) -> bool:
    return any(isinstance(value, Curriculum) for value in arguments(function).values())


def with_grown(function: Callable[..., Any], trained: Any) -> Callable[..., Any]:
    """A term with the values of its curricula after this number of steps trained."""
    if not has_curriculum(function):
        return function
    return functools.partial(function, **{name: grown(value, trained) for name, value in arguments(function).items()})


def called(key: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a term; its mistakes are errors of the configuration that name the key."""
    try:
        return function(*args)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from None
    except Exception as error:
        raise ConfigError(f"{key}: raises {type(error).__name__}: {first_line(error)}") from error
