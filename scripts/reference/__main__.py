"""Writes docs/configuration.md and docs/terms.md.

The values of keys come from the typed configuration, their meaning from the comments of configs/.
"""

import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from rlstable.config import Config
from rlstable.config.defaults import config_dir, defaults
from rlstable.config.schema import Section
from scripts.pages import table
from scripts.reference import terms
from scripts.reference.comments import comments_of, written

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
PAGE_OF_TERMS = PAGE.with_name("terms.md")
_INTRODUCTION = """# Configuration

A key is typed as in these tables: `python -m rlstable.train ppo.learning_rate=1e-3`. A group is chosen by its name:
`guards=strict`. An unknown key, a wrong type, a value out of range or an impossible combination is an error of one
line each, before anything compiles. `python -m rlstable.train ... --cfg job` prints the whole configuration of a
command line.
"""
_TOP = "The run"
_WORDS = {bool: "`true` or `false`", str: "text", dict: "a mapping", int: "a whole number", float: "a number"}


def page() -> str:
    parts = [_INTRODUCTION, "## Groups", "", _groups(), ""]
    files = [config_dir() / name for name in ("config.yaml", "recipe_for/auto.yaml")]
    comments = {key: text for file in files for key, text in comments_of(file).items()}
    default = defaults("")
    rows = (
        (name, field, default.get(name, "???"), comments.get(name, ""))
        for name, field in Config.model_fields.items()
        if _section(field) is None
    )
    parts += [f"## {_TOP}", "", _table(rows), ""]
    for name, field in Config.model_fields.items():
        if (model := _section(field)) is not None:
            parts += [f"## {name}", "", f"{(model.__doc__ or '').splitlines()[0]}", "", _table(_keys(name, model)), ""]
    return "\n".join(parts)


def _keys(group: str, model: type[Section]) -> Iterator[tuple[str, FieldInfo, Any, str]]:
    folder = config_dir() / group / "default.yaml"
    comments = comments_of(folder if folder.is_file() else config_dir() / "config.yaml")
    prefix = "" if folder.is_file() else f"{group}."

    def walk(path: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo, Any, str]]:
        default = defaults(section.at or "")
        for name, field in section.model_fields.items():
            key = f"{path}{name}"
            inner = _section(field)
            if inner is None:
                yield f"{group}.{key}", field, default.get(name, "???"), comments.get(f"{prefix}{key}", "")
            else:
                yield from walk(f"{key}.", inner)

    return walk("", model)


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _table(keys: Any) -> str:
    rows = []
    for key, field, value, comment in keys:
        default = "" if value == "???" else f"`{written(value)}`"
        meaning = comment.replace("|", "\\|").replace("<", "&lt;")
        rows.append((f"`{key}`", _values(field.annotation, tuple(field.metadata)), default, meaning))
    return "\n".join(table(("key", "values", "default", "meaning"), rows, range(4)))


def _values(kind: Any, metadata: tuple[Any, ...]) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _values(args[0], (*args[1:], *metadata))
    if origin in (Union, types.UnionType):
        words = [_values(arg, metadata) for arg in args if arg is not type(None)]
        return " or ".join([*words, *(["`null`"] if type(None) in args else [])])
    if origin is Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        inner = _values(args[0], ())
        return f"a list of {inner[0].lower()}{inner[1:]}"
    if origin in (dict, Mapping):
        return _WORDS[dict]
    if isinstance(kind, type) and issubclass(kind, Section):
        return f"see {kind.__name__}" if kind.__doc__ is None else kind.__doc__.splitlines()[0].rstrip(".")
    return _WORDS.get(kind, str(kind)) + _range(metadata)


def _range(metadata: tuple[Any, ...]) -> str:
    """Returns the bounds in words, without bounds beyond every useful value."""
    every = [one for item in metadata for one in getattr(item, "metadata", None) or [item]]
    bounds = {name: getattr(one, name) for one in every for name in ("gt", "ge", "lt", "le") if hasattr(one, name)}
    words = []
    if "gt" in bounds and bounds["gt"] >= bounds.get("ge", bounds["gt"]):
        words.append(f"above {bounds['gt']:g}")
    elif bounds.get("ge", -1e30) > -1e30:
        words.append(f"{bounds['ge']:g} or more")
    if bounds.get("le", 1e30) < 2**31 - 1:
        words.append(f"{bounds['le']:g} at most")
    if bounds.get("lt", 1e30) < 2**31 - 1:
        words.append(f"below {bounds['lt']:g}")
    return ", " + ", ".join(words) if words else ""


def _groups() -> str:
    rows = []
    root = config_dir()
    for folder in sorted({path.parent for path in root.rglob("*.yaml")} - {root}):
        names = (f"`{path.stem}`" for path in sorted(folder.glob("*.yaml")))
        rows.append((f"`{folder.relative_to(root)}`", ", ".join(names)))
    return "\n".join(table(("group", "choices"), rows, range(2)))


if __name__ == "__main__":
    PAGE.write_text(page())
    PAGE_OF_TERMS.write_text(terms.page())
