"""Pages of results: Markdown tables, sections between markers, and pictures."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlstable.config import ConfigError
from rlstable.io.run_folder import write_atomically
from scripts import results
from scripts.results import Row

SETTINGS = "Settings, as `python -m rlstable.train` takes them:"
BEGIN, END = "<!-- bench: {} -->", "<!-- end of bench: {} -->"


@dataclasses.dataclass(frozen=True)
class Section:
    """A benchmark's section of the page."""

    name: str  # name of the section in its markers
    title: str  # heading
    header: tuple[str, ...]  # column titles; a title or a cell may have line breaks for narrow terminals
    cells: list[tuple[str, ...]]  # the table by row
    notes: list[str]  # a note per row: its settings and remarks
    rows: list[Row]  # all measurements, for JSON
    pictures: list[str] = dataclasses.field(default_factory=list)  # markdown of the pictures
    before_notes: str = SETTINGS  # the line above the notes


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Returns the lines of a Markdown table."""
    rule = ["---" if column in left else "---:" for column in range(len(header))]
    return [f"| {' | '.join(cells)} |".replace("\n", " ") for cells in (header, rule, *rows)]


def machine() -> str:
    """Returns a sentence with the versions and the device of this process."""
    import jax

    versions = results.versions()
    packages = ", ".join(f"{name} {versions[name]}" for name in ("jax", "brax", "mujoco", "mujoco-mjx"))
    return f"Python {versions['python']}, {packages}, on {jax.devices()[0].device_kind}."


def device_part(section: Section, device: Row, versions: dict[str, str]) -> str:
    commits = ", ".join(dict.fromkeys(row["commit"] for row in section.rows if row.get("commit")))
    parts = [
        f"### {device['kind']}\n",
        *table(section.header, section.cells),
        "",
        f"Device: platform {device['platform']}, kind {device['kind']}, {device['cpus']} CPUs. "
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions.items())}"
        f"{f' ({commits})' if commits else ''}.\n",
        *(f"{picture}\n" for picture in section.pictures),
        f"{section.before_notes}\n",
        *(f"- {note}" for note in section.notes),
    ]
    return "\n".join(parts) + "\n"


def read(path: Path) -> str:
    """Returns the text of a page; empty if there is no page yet."""
    if not path.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--out: cannot write to {path.parent}")
    try:
        return path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--out: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"--out: cannot write to {path}: {error.strerror or error}") from error


def cut(page: str, name: str) -> tuple[str, str, dict[str, str], str]:
    """Returns the text before a section, the section's prose, its parts by kind of device, and the text after it."""
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in page and end not in page:
        return f"{(page or '# Benchmarks').rstrip()}\n\n", "", {}, "\n"
    before, _, rest = page.partition(begin)
    inside, _, after = rest.partition(end)
    if page.count(begin) != 1 or rest.count(end) != 1 or end in before:
        raise ConfigError(f"--out: the section {name} must have one {begin} and after it one {end}")
    first, last = (marker.format(f"{name} on ").removesuffix(" -->") for marker in (BEGIN, END))
    found = re.findall(f"{re.escape(first)}(.+?) -->\n(.*?){re.escape(last)}\\1 -->\n", inside, re.DOTALL)
    if not len(found) == inside.count(first) == inside.count(last):
        raise ConfigError(f"--out: a part of the section {name} has lost a marker; restore the marker first")
    return before, inside.partition(first)[0].strip(), dict(found), after


def updated(page: str, section: Section, kind: str, part: str, without: str | None = None) -> str:
    """Returns the page with a section's part for one kind of device replaced or added; prose stays.

    Args:
        page: Text of the page.
        section: The section.
        kind: Kind of device.
        part: Text of the part; if empty, the part leaves the page.
        without: Platform whose other parts leave the page; None keeps all other parts.
    """
    if not part and BEGIN.format(section.name) not in page:
        return page
    before, prose, parts, after = cut(page, section.name)
    parts = {key: text for key, text in parts.items() if key == kind or f"platform {without}," not in text}
    parts = {key: text for key, text in (parts | {kind: part}).items() if text}
    blocks = [f"{prose or f'## {section.title}'}\n"]
    blocks += [_marked(f"{section.name} on {key}", text) for key, text in parts.items()]
    return before + _marked(section.name, "\n".join(blocks)).rstrip("\n") + after


def _marked(name: str, text: str) -> str:
    return f"{BEGIN.format(name)}\n{text}{END.format(name)}\n"


def fill(path: Path, parts: Mapping[str, str]) -> None:
    """Replaces a page's generated parts between their markers, or appends them; the page's prose stays."""
    page = path.read_text() if path.exists() else ""
    for name, text in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        if begin not in page:
            page = f"{page.rstrip()}\n\n{begin}\n{end}\n".lstrip()
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
    path.write_text(page)


def file_name(stem: str, kind: str) -> str:
    """Returns the name of a picture for a kind of device."""
    return f"{stem}_{re.sub('[^a-z0-9]+', '_', kind.lower())}.png"


@contextlib.contextmanager
def picture(path: Path, dpi: int = 130, tight: bool = True, **layout: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a Matplotlib figure and its axes, then saves the figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(**layout)
    yield figure, axes
    figure.savefig(path, dpi=dpi, bbox_inches="tight" if tight else None)
    plt.close(figure)


def plain(axes: Any, label: str = "", size: int = 8) -> None:
    """Gives axes a label, small text and no frame above and on the right."""
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=size, which="both")
    axes.spines[["top", "right"]].set_visible(False)
