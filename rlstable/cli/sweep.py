"""Prints the summary of a sweep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlstable.io.run_folder import read_result, return_of
from rlstable.supervise.stop_reasons import StopReason, command


class SweepSummary(Callback):
    """Prints one table at the end of a sweep. Reads the jobs' `result.json`, so that it works with every launcher.

    Attributes:
        exit_codes: Exit codes of the last sweep's jobs, which may have run in other processes.
    """

    exit_codes: ClassVar[list[int]] = []

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the table."""
        sweep_dir = Path(config.hydra.sweep.dir)
        type(self).exit_codes.clear()
        table = Table("job", "overrides", "stop reason", "steps", "return", "best", title=Text(f"sweep {sweep_dir}"))
        for folder in sorted((path.parent for path in sweep_dir.glob("*/result.json")), key=_job_number):
            saved = read_result(folder)
            result = saved or {}
            # A damaged result counts as an error.
            type(self).exit_codes.append(
                StopReason.error.exit_code if saved is None else int(result.get("exit_code", 0))
            )
            cells = (
                result.get("stop_reason"),
                result.get("step"),
                result.get("return"),
                return_of(result),
            )
            overrides = " ".join(result.get("overrides", []))
            # As `Text`, because rich reads square brackets in a string as markup.
            table.add_row(*map(Text, (folder.name, overrides, *map(_cell, cells))))
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table)
        last = f"compare them  {command('report', sweep_dir, 'sweep=')}"
        console.print(last, highlight=False, markup=False, soft_wrap=True)


def _job_number(folder: Path) -> tuple[int, str]:
    return (int(folder.name), "") if folder.name.isdigit() else (sys.maxsize, folder.name)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
