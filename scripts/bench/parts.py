"""Benchmarks of several parts: each is kept as it is measured, so that one of them can be measured anew by itself."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from rlstable.config import ConfigError
from scripts.race import results as race_results

Row = dict[str, Any]
Report = TypeVar("Report")


@dataclasses.dataclass(frozen=True)
class Parts(Generic[Report]):
    """A benchmark.

    Attributes:
        name: The subcommand.
        settings: What is typed for each part, in the order of the page; other settings are another part.
        asked: How it is to be measured, which makes other rows too.
        measure: Rows of a part, by its name.
        report: What is said of the rows of several parts.
    """

    name: str
    settings: Mapping[str, Sequence[str]]
    asked: Row
    measure: Callable[[str], list[Row]]
    report: Callable[[list[Row]], Report]


def run(parts: Parts[Report], asked: Sequence[str] | None, path: Path, where: Row, what: Row) -> Iterator[Report]:
    """Measures parts, and after each says what there is of all of them.

    Args:
        parts: The benchmark.
        asked: The parts to be measured, None for all.
        path: Where rows are kept, a line of JSON per part that was measured; the last one counts.
        where: The device.
        what: Versions; what was measured in others, or on another kind of device, is left out.

    Raises:
        ConfigError: That file cannot be read or written, or settings cannot work.
    """
    lines = race_results.read(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"cannot write to {path}")
    for name in dict.fromkeys(asked or parts.settings):
        line = _identity(parts, name, where, what) | {"commit": race_results.commit()}
        line["rows"] = parts.measure(name)
        race_results.add(path, line)
        lines.append(line)
        yield parts.report(_kept(parts, lines, where, what))


def _kept(parts: Parts[Any], lines: Sequence[Row], where: Row, what: Row) -> list[Row]:
    """The rows of every part that was measured, the last time that it was."""
    rows = []
    for name in parts.settings:
        wanted = _identity(parts, name, where, what)
        own = [line for line in lines if all(line.get(key) == value for key, value in wanted.items())]
        rows += [row | {"commit": line["commit"]} for line in own[-1:] for row in line["rows"]]
    return rows


def _identity(parts: Parts[Any], name: str, where: Row, what: Row) -> Row:
    fixed = {"benchmark": parts.name, "part": name, "settings": list(parts.settings[name]), "asked": parts.asked}
    return fixed | {"device": where, "versions": what}
