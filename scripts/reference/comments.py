"""Comments of keys in YAML files, and values as YAML writes them."""

import re
from pathlib import Path
from typing import Any


def comments_of(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    above: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in path.read_text().splitlines():
        comment, key = re.match(r" *# ?(.*)", line), re.match(r"( *)(\w+):", line)
        if comment and not comment[1].startswith("@"):  # a directive of Hydra
            above.append(comment[1])
        elif key:
            indent = len(key[1])
            parents = [(depth, name) for depth, name in parents if depth < indent] + [(indent, key[2])]
            found[".".join(name for _, name in parents)] = " ".join(above)
            above = []
        else:
            above = []
    return found


def written(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(written, value)) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).lower() if isinstance(value, bool) else str(value)
