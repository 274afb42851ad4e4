"""The command `python -m rlstable.report run=runs/...`: writes a page about runs or about a sweep.

The exit code is 0 if the page was written, 2 for an error of the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, model_validator

from rlstable.cli import command
from rlstable.config.schema import KeyedError, Section

_EPILOG = """
examples:
  python -m rlstable.report run=runs/ant/2026-01-31_22-00-00
  python -m rlstable.report run=runs/ant/2026-01-31_22-00-00 run=runs/ant/2026-02-01_09-00-00 out=two.html
  python -m rlstable.report sweep=runs/sweeps/2026-01-31_22-00-00
"""
_PAGES = (".html", ".htm")  # only files with these endings are overwritten


class ReportOptions(Section):
    """Arguments: the run, and the file to write."""

    run: tuple[Path, ...] = Field((), description="folder of a run; several runs share the charts")
    sweep: Path | None = Field(None, description="folder of a sweep, instead of runs")
    out: Path | None = Field(None, description="file to write; null for report.html in the first folder")

    @model_validator(mode="after")
    def _check(self) -> ReportOptions:
        if bool(self.run) == (self.sweep is not None):
            raise KeyedError("run", "name runs or a sweep, run=<folder> or sweep=<folder>")
        if self.out is not None and self.out.is_dir():
            raise KeyedError("out", f"{self.out} is a folder; give a file, {self.out / 'report.html'}")
        if self.out is not None and self.out.exists() and self.out.suffix not in _PAGES:
            raise KeyedError("out", f"{self.out} exists and is not a page; choose a name that ends in .html")
        return self


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page and prints its path."""
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


def write(options: ReportOptions) -> Path:
    """Writes the page and returns its path.

    Raises:
        ConfigError: A folder holds no run, or the file cannot be written.
    """
    from rlstable.config import ConfigError
    from rlstable.io.run_folder import write_atomically
    from rlstable.report.page import page
    from rlstable.report.run_record import read_records
    from rlstable.report.sweep import read_sweep
    from rlstable.report.sweep_page import sweep_page

    if options.sweep is None:
        folder, text = options.run[0], page([record for folder in options.run for record in read_records(folder)])
    else:
        folder, text = options.sweep, sweep_page(options.sweep, read_sweep(options.sweep))
    path = options.out or folder / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise ConfigError(f"out: cannot write {path}: {error.strerror or error}; choose another file") from error
    return path


if __name__ == "__main__":
    main()
