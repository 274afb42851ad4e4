"""Prints the summary of a sweep: a table of its jobs, its best setting and the next commands.

Hydra imports this module for every run, so NumPy and rich are imported only at the end of a sweep.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from rlstable.config import ConfigError
from rlstable.io.outcome import outcome_of
from rlstable.io.printed_commands import command
from rlstable.io.run_folder import read_result
from rlstable.supervise.stop_reasons import StopReason


class SweepSummary(Callback):
    """Prints one table at the end of a sweep. Reads the jobs' `result.json`, so that it works with every launcher."""

    exit_codes: ClassVar[list[int]] = []  # of the last sweep's jobs, which may have run in other processes

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from rlstable.report.sweep import job_number

        sweep_dir = Path(config.hydra.sweep.dir)
        type(self).exit_codes.clear()
        table = Table(
            "job", "overrides", "stop reason", "steps", "return", "best evaluation", title=Text(f"sweep {sweep_dir}")
        )
        for folder in sorted((path.parent for path in sweep_dir.glob("*/result.json")), key=job_number):
            result = read_result(folder) or {}
            code = result.get("exit_code", 0 if result else None)  # a damaged result counts as an error
            type(self).exit_codes.append(code if isinstance(code, int) else StopReason.error.exit_code)
            outcome = outcome_of(result)
            cells = (result.get("stop_reason"), result.get("step"), outcome.value, outcome.best)
            overrides = " ".join(map(str, result.get("overrides") or ()))
            # As `Text`, because rich reads square brackets in a string as markup.
            table.add_row(*map(Text, (folder.name, overrides, *map(_cell, cells))))
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table)
        for line in (*_best(sweep_dir), *_page(sweep_dir)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _best(sweep_dir: Path) -> list[str]:
    """The lines about the best setting; none if there is only one setting."""
    from rlstable.report.sweep import read_sweep, settings_of, verdict

    try:
        settings = settings_of(jobs := read_sweep(sweep_dir))
    except ConfigError:  # no job has left a file
        return []
    sentence, command = verdict(jobs, settings)
    return [] if len(settings) < 2 else [sentence, f"train it      {command}"] if command else [sentence]


def _page(sweep_dir: Path) -> list[str]:
    """Writes the page of the sweep, and returns the line that names it."""
    from rlstable.report.__main__ import ReportOptions, write

    try:
        return [f"page          {write(ReportOptions(run=(), sweep=sweep_dir, out=None))}"]
    except (ConfigError, OSError) as error:  # the runs are trained all the same
        return [f"no page       {error}; {command('report', sweep_dir, 'sweep=')}"]


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
