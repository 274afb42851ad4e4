"""The section of the report page about recorded episodes: links, and the newest recording in the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlstable.io.run_folder import seed_folders
from rlstable.report.markup import swatch, text
from rlstable.report.run_record import RunRecord

_LINKS = 20  # of a run; the newest recordings


def episodes(records: Sequence[RunRecord], opened: bool = False) -> str:
    """The section about a run, or about the seeds of a run; empty without recordings.

    The newest recording of one run is `opened` or folded away. Links are relative to the run folder, in which the page
    lies by default. Other runs have no common folder.
    """
    folders = [record.folder for record in records]
    base = folders[0] if len(folders) == 1 else folders[0].parent
    if len(folders) > 1 and not set(folders) <= set(seed_folders(base)):
        return ""
    found = [recordings(folder) for folder in folders]
    lists = []
    for index, (record, pages) in enumerate(zip(records, found, strict=True)):
        if pages:
            links = ", ".join(f'<a href="{_address(path, base)}">{_name(path)}</a>' for path in pages[:_LINKS])
            older = f" and {len(pages) - _LINKS:,} older ones" if len(pages) > _LINKS else ""
            name = f"{swatch(index)}{text(record.name)}: " if len(records) > 1 else ""
            lists.append(f"<li>{name}{links}{older}</li>")
    if not lists:
        return ""
    newest = _embedded(found[0][0], base, opened) if len(records) == 1 else ""
    return f'<h2 id="episodes">Episodes</h2><ul class="episodes">{"".join(lists)}</ul>{newest}'


def recordings(run_dir: Path) -> list[Path]:
    """Pages of recorded episodes: first the pages of `rlstable render`, then those of training, newest first."""
    pages = (run_dir / "episodes").glob("*.html")
    return sorted(pages, key=lambda path: (not path.stem.isdigit(), int(path.stem) if path.stem.isdigit() else 0))[::-1]


def _embedded(page: Path, base: Path, opened: bool) -> str:
    """A recording inside the page, without access to anything but itself."""
    frame = f'<iframe sandbox="allow-scripts" data-src="{_address(page, base)}" title="recorded episode"></iframe>'
    # Loaded when it is unfolded: the page of a running run loads itself again and again.
    load = "const frame = this.querySelector('iframe'); if (this.open) frame.src = frame.dataset.src"
    state = "open " * opened
    return f'<details {state}ontoggle="{load}"><summary>watch {_name(page)}</summary>{frame}</details>'


def _address(path: Path, base: Path) -> str:
    return quote(path.relative_to(base).as_posix())


def _name(path: Path) -> str:
    return f"step {int(path.stem):,}" if path.stem.isdigit() else text(path.stem)
