"""Python values as overrides in Hydra's grammar."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

_NO_STRINGS = {"null", "true", "false", "inf", "nan"}


def overrides(key: str, value: object) -> list[str]:
    """A keyword argument as Hydra overrides; a mapping is one override for each of its keys."""
    if is_mapping(value):
        return [f"{key}.{name}={literal(inner)}" for name, inner in value.items()]
    return [f"{key}={literal(value)}"]


def is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether a value is a mapping, or has the methods of one, as the `ConfigDict` of ml_collections."""
    return isinstance(value, Mapping) or (hasattr(value, "keys") and hasattr(value, "items"))


def literal(value: object) -> str:
    """A Python value, or a number or array of NumPy or JAX, in Hydra's override grammar."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if is_mapping(value):
        return "{" + ", ".join(f"{name}: {literal(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(literal(inner) for inner in value) + "]"
    if isinstance(value, str | Path):
        text = str(value)
        # Without quotes, Hydra would read some strings as a number, a truth value or null.
        plain = re.fullmatch(r"[A-Za-z_./][\w\-./:]*", text, re.ASCII) and text.lower() not in _NO_STRINGS
        # Hydra unescapes only the backslashes before a quote.
        return text if plain else '"' + re.sub(r'(\\*)("|\Z)', _escaped, text) + '"'
    return repr(value)


def _escaped(match: re.Match[str]) -> str:
    backslashes, quote = match.groups()
    return 2 * backslashes + (f"\\{quote}" if quote else "")
