"""A report as tables for a terminal and as data for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from rlstable.doctor.checkup import Memory, Report
from rlstable.doctor.robot import RobotFacts
from rlstable.supervise.memory import readable

_MOST_NAMES = 4
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def sections(report: Report) -> list[tuple[str, Table | Text]]:
    return [
        *(_robot(report.robot) if report.robot else []),
        ("Machine", _pairs([*report.machine.items()])),
        *([("Memory", _memory(report.memory))] if report.memory else []),
        (f"Findings ({report.task}, {report.engine})", _findings(report)),
    ]


def _robot(robot: RobotFacts) -> list[tuple[str, Table | Text]]:
    return [
        ("Model", _pairs([*robot.model.items()])),
        ("Joints", _rows(robot.joints)),
        ("Actuators", _rows(robot.actuators)),
        ("Task", _pairs([*robot.task.items()])),
    ]


def _rows(rows: Sequence[Mapping[str, str | float | None]]) -> Table:
    """A table of rows with the same keys, without columns that repeat the first one."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    first, *others = rows[0]
    shown = [first, *(name for name in others if any(row[name] != row[first] for row in rows))]
    for name in shown:
        numbers = not any(isinstance(row[name], str) for row in rows)
        header = f"  {name}" if name == first else name
        table.add_column(header, no_wrap=True, justify="right" if numbers else "left")
    for row in rows:
        cells = [row[name] for name in shown]
        texts = ["-" if x is None else x if isinstance(x, str) else f"{x:.4g}" for x in cells]
        table.add_row(Text(f"  {texts[0]}"), *map(Text, texts[1:]))
    return table


def _memory(memory: Memory) -> Table:
    limit = "unknown" if memory.limit is None else readable(memory.limit)
    rows = [("training", "not estimated")]
    if memory.needed is not None and memory.footprint is not None:
        share, parts = memory.share or 0.0, memory.footprint
        of_limit = f"{100 * share:.0f} %" if share >= 0.01 else "less than 1 %"
        rows = [
            ("training", readable(memory.needed) + (f", {of_limit} of the limit" if share else "")),
            ("per device", f"{readable(parts.arguments)} of state, {readable(parts.temporary)} while the program runs"),
        ]
    state = f"{readable(memory.per_environment)} of state between steps"
    return _pairs([*rows, ("limit", limit), ("an environment", state)])


def _findings(report: Report) -> Table | Text:
    if not report.findings:
        return Text("  no findings")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in report.findings:
        more = len(finding.subject) - _MOST_NAMES
        listed = ", ".join(finding.subject[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        subject = f" ({listed})" if listed else ""
        text = Text.assemble(
            (f"{finding.check}{subject}: ", "bold"), f"{finding.what}.\n", ("do: ", "dim"), finding.advice
        )
        table.add_row(Text(f"  {finding.severity}", style=_STYLES[finding.severity]), text)
    return table


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(f"  {name}", Text(value))
    return table


def as_data(report: Report) -> dict[str, Any]:
    return dataclasses.asdict(report) | {"verdict": report.verdict, "exit_code": report.exit_code}
