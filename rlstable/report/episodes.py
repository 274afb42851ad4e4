"""The section of the report page about recorded episodes: links, and the newest recording in the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlstable.io.run_folder import seed_folders
from rlstable.report.markup import swatch, text
from rlstable.report.run_record import RunRecord

_LINKS = 20  # of a run; the newest recordings


def episodes(records: Sequence[RunRecord]) -> str:
    """Returns the section about a run, or about the seeds of a run; empty without recordings.

    Links are relative to the run folder, in which the page lies by default. Other runs have no common folder.
    """
    base = _folder_of_page(records)
    if base is None:
        return ""
    lists = []
    for index, record in enumerate(records):
        found = recordings(record.folder)
        if found:
            links = ", ".join(_link(path, base) for path in found[:_LINKS])
            older = f" and {len(found) - _LINKS:,} older ones" if len(found) > _LINKS else ""
            name = f"{swatch(index)}{text(record.name)}: " if len(records) > 1 else ""
            lists.append(f"<li>{name}{links}{older}</li>")
    if not lists:
        return ""
    return f'<h2>Episodes</h2><ul class="episodes">{"".join(lists)}</ul>{_newest(records, base)}'


def recordings(run_dir: Path) -> list[Path]:
    """Pages of recorded episodes: first the pages of `rlstable render`, then those of training, newest first."""
    pages = (run_dir / "episodes").glob("*.html")
    return sorted(pages, key=lambda path: (not path.stem.isdigit(), int(path.stem) if path.stem.isdigit() else 0))[::-1]


def _folder_of_page(records: Sequence[RunRecord]) -> Path | None:
    if len(records) == 1:
        return records[0].folder
    parents = {record.folder.parent for record in records}
    parent = parents.pop()
    of_run = not parents and {record.folder for record in records} <= set(seed_folders(parent))
    return parent if of_run else None


def _newest(records: Sequence[RunRecord], base: Path) -> str:
    """Returns the newest recording of a single run inside the page, folded away."""
    if len(records) > 1:
        return ""
    newest = recordings(records[0].folder)[0]
    frame = f'<iframe data-src="{_address(newest, base)}" title="recorded episode"></iframe>'
    # Loaded when it is unfolded: the page of a running run loads itself again and again.
    load = "const frame = this.querySelector('iframe'); if (this.open) frame.src = frame.dataset.src"
    return f'<details ontoggle="{load}"><summary>watch {_name(newest)}</summary>{frame}</details>'


def _link(path: Path, base: Path) -> str:
    return f'<a href="{_address(path, base)}">{_name(path)}</a>'


def _address(path: Path, base: Path) -> str:
    return quote(path.relative_to(base).as_posix())


def _name(path: Path) -> str:
    return f"step {int(path.stem):,}" if path.stem.isdigit() else text(path.stem)
