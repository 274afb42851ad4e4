"""Benchmarks of several parts: each part is saved when it is measured, so that one part can be measured alone."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from scripts import results
from scripts.pages import Section
from scripts.results import Row


@dataclasses.dataclass(frozen=True)
class Parts:
    name: str  # the subcommand
    # overrides by part, in the order of the page. A part with other overrides is another part
    settings: Mapping[str, Sequence[str]]
    asked: Row  # options of the measurement, such as the number of pairs. Rows with other options do not count
    measure: Callable[[str], list[Row]]  # returns the rows of a part
    section: Callable[[list[Row]], Section]  # makes the section of the page from the rows of all parts

    def run(self, asked: Sequence[str] | None, path: Path, device: Row, versions: Row) -> Iterator[Section]:
        """Measures parts, and yields the section of all known parts after each."""
        lines = results.read(path)
        results.check_writable(path)
        for name in dict.fromkeys(asked or self.settings):
            line = self._identity(name, device, versions) | {"commit": results.commit()}
            line["rows"] = self.measure(name)
            results.add(path, [line])
            lines.append(line)
            yield self.section(self.known(lines, device, versions))

    def known(self, lines: Sequence[Row], device: Row, versions: Row) -> list[Row]:
        """Returns the rows of every part's last line."""
        last = [results.matching(lines, **self._identity(name, device, versions))[-1:] for name in self.settings]
        return [row | {"commit": line["commit"]} for own in last for line in own for row in line["rows"]]

    def _identity(self, name: str, device: Row, versions: Row) -> Row:
        fixed = {"benchmark": self.name, "part": name, "settings": list(self.settings[name]), "asked": self.asked}
        return fixed | {"device": device, "versions": versions}
