"""The command `python -m rlstable.report run=runs/...`: writes a page about runs or about a sweep.

The exit code is 0 if the page was written, 2 for an error of the user.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from rlstable.cli import command
from rlstable.cli.options import LATEST, found_run
from rlstable.config.schema import Folder, KeyedError, Section, expand_home

_EPILOG = """
examples:
  python -m rlstable.report                               the newest run in runs
  python -m rlstable.report run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.report run=runs/ant/2026-01-31_22-00-00 run=runs/ant/2026-02-01_09-00-00 out=two.html
  python -m rlstable.report sweep=runs/sweeps/2026-01-31_22-00-00
"""
_PAGES = (".html", ".htm")  # only files with these endings are overwritten


def _found_runs(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(map(found_run, folders))


def _found_sweep(folder: Path) -> Path:
    if folder != LATEST:
        return expand_home(folder)
    sweeps = [path for path in Path("runs", "sweeps").glob("*") if path.is_dir()]
    if not sweeps:
        raise ValueError(
            "there is no sweep in runs/sweeps yet; make one with rlstable train --multirun seed=0,1, or write "
            "sweep=<folder>"
        )
    newest = max(sweeps, key=lambda path: path.stat().st_mtime)
    print(f"sweep: {newest}, the newest in runs/sweeps", file=sys.stderr)
    return newest


class ReportOptions(Section):
    """Arguments: the run, and the file to write."""

    run: Annotated[tuple[Path, ...], AfterValidator(_found_runs)] = Field(
        (), description="folder of a run; latest, the newest in runs, is the default; several runs share the charts"
    )
    sweep: Annotated[Path, AfterValidator(_found_sweep)] | None = Field(
        None, description="folder of a sweep, instead of runs; latest, the newest in runs/sweeps"
    )
    out: Folder | None = Field(None, description="file to write; null for report.html in the first folder")

    @model_validator(mode="before")
    @classmethod
    def _default(cls, data: Any) -> Any:
        named = data.get("run") or data.get("sweep")
        return data if named else {**data, "run": [LATEST]}

    def _check(self) -> None:
        if self.run and self.sweep is not None:
            raise KeyedError("run", "cannot be combined with sweep; leave one of them out")
        if self.out is not None and self.out.is_dir():
            raise KeyedError("out", f"{self.out} is a folder; give a file, {self.out / 'report.html'}")
        if self.out is not None and self.out.exists() and self.out.suffix not in _PAGES:
            raise KeyedError("out", f"{self.out} exists and is not a page; choose a name that ends in .html")


def main(argv: Sequence[str] | None = None) -> None:
    parser = command.key_parser(
        "report", "Writes a page about one run, or about several together.", ReportOptions, _EPILOG
    )
    args = parser.parse_intermixed_args(argv)
    with command.working():
        path = write(command.options(ReportOptions, args.words))
    if args.json:
        command.print_json({"file": str(path)})
    else:
        print(path)


def sweep_report(argv: Sequence[str] | None = None) -> None:
    """Writes the page about a sweep: `main` with `sweep=` before a folder, and the newest sweep as default."""
    words = [word if "=" in word or word.startswith("-") else f"sweep={word}" for word in argv or sys.argv[1:]]
    main(words if any(word.startswith("sweep=") for word in words) else ["sweep=latest", *words])


def write(options: ReportOptions) -> Path:
    """Writes the page and returns its path; a `ConfigError` if a folder holds no run."""
    from rlstable.io.files import require_replaceable, write_atomically
    from rlstable.report.page import page
    from rlstable.report.run_record import read_records
    from rlstable.report.sweep import read_sweep
    from rlstable.report.sweep_page import sweep_page

    path = options.out or (options.sweep or options.run[0]) / "report.html"
    if options.sweep is None:
        text = page([record for folder in options.run for record in read_records(folder)])
    else:
        text = sweep_page(options.sweep, read_sweep(options.sweep), path.parent)
    require_replaceable(path.parent, [path.name], "out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)
    return path


if __name__ == "__main__":
    main()
