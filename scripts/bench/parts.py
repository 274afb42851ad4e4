"""Benchmarks of several parts: each part is saved when it is measured, so that one part can be measured alone."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rlstable.config import ConfigError
from scripts import results, sittings
from scripts.pages import Section
from scripts.results import Row
from scripts.sittings import Sitting


@dataclasses.dataclass(frozen=True)
class Parts:
    name: str  # the subcommand
    # overrides by part, in the order of the page. A part with other overrides is another part
    settings: Mapping[str, Sequence[str]]
    chosen: Sequence[str]  # names of the parts to measure, in their order
    asked: Row  # options of the measurement, such as the number of pairs. Rows with other options do not count
    measure: Callable[[str, Sitting], list[Row]]  # returns the rows of a part
    section: Callable[[list[Row]], Section]  # makes the section of the page from the rows of all parts


class PartsRun:
    """Parts with their lines in a file.

    Attributes:
        name: The subcommand.
    """

    def __init__(self, parts: Parts, path: Path, device: Row, versions: Row):
        self.name = parts.name
        self._parts = parts
        self._path = path
        self._device = device
        self._versions = versions
        self._lines = results.read(path)

    def newest(self) -> str | None:
        """Returns None: without `--sitting`, every measurement starts a new sitting."""
        return None

    def missing(self, sitting: str) -> list[str]:
        """Returns the names of the chosen parts that a sitting has not measured."""
        names = dict.fromkeys(self._parts.chosen)
        return [name for name in names if not self._known(name, sitting=sitting)]

    def run(self, sitting: Sitting) -> Iterator[Section]:
        """Measures missing parts, and yields the section of all known parts after each."""
        results.check_writable(self._path)
        for name in self.missing(sitting.name):
            what = f"{self.name} {name}"
            if not sitting.fits(what, self._expected(name)):
                continue
            line = self._identity(name) | {"commit": results.commit(), "sitting": sitting.name}
            started = sittings.now()
            try:
                line["rows"] = self._parts.measure(name, sitting)
            except (ConfigError, RuntimeError) as error:  # also an error of JAX, or a failed process
                sitting.failed.append(f"{what}: {str(error).partition(chr(10))[0]}")
                continue
            line["took"] = round(sittings.now() - started, 2)
            results.add(self._path, [line])
            self._lines.append(line)
            yield self._parts.section(self.rows())

    def rows(self, **wanted: str) -> list[Row]:
        """Returns the rows of every part's last line with the wanted values."""
        last = [line for name in self._parts.settings for line in self._known(name, **wanted)[-1:]]
        return [row | {"commit": line["commit"]} for line in last for row in line["rows"]]

    def _known(self, name: str, **wanted: str) -> list[Row]:
        return results.matching(self._lines, **self._identity(name), **wanted)

    def _expected(self, name: str) -> float:
        """Returns the seconds that a part last took on this kind of device; 0 if unknown."""
        own = results.matching(self._lines, benchmark=self._parts.name, part=name)
        took = [line.get("took", 0.0) for line in own if line["device"]["kind"] == self._device["kind"]]
        return float(took[-1]) if took else 0.0

    def _identity(self, name: str) -> Row:
        parts = self._parts
        fixed = {"benchmark": parts.name, "part": name, "settings": list(parts.settings[name]), "asked": parts.asked}
        return fixed | {"device": self._device, "versions": self._versions}
