"""The section of the report page about recorded episodes: links to their pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from rlstable.io.run_folder import seed_folders
from rlstable.report.markup import swatch, text
from rlstable.report.run_record import RunRecord

_LINKS = 20  # of a run; the newest recordings


def episodes(records: Sequence[RunRecord]) -> str:
    """The section about a run, or about the seeds of a run; empty without recordings.

    Links are relative to the run folder, in which the page lies by default. Other runs have no common folder.
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
    return f'<h2 id="episodes">Episodes</h2><ul class="episodes">{"".join(lists)}</ul>' if lists else ""


def recordings(run_dir: Path) -> list[Path]:
    """Pages of recorded episodes: first the pages of `rlstable render`, then those of training, newest first."""
    pages = (run_dir / "episodes").glob("*.html")
    return sorted(pages, key=lambda path: (not path.stem.isdigit(), int(path.stem) if path.stem.isdigit() else 0))[::-1]


def _address(path: Path, base: Path) -> str:
    return quote(path.relative_to(base).as_posix())


def _name(path: Path) -> str:
    return f"step {int(path.stem):,}" if path.stem.isdigit() else text(path.stem)
