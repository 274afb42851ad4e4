"""The part of a run's page with the settings that a resume changed."""

from __future__ import annotations

from collections.abc import Sequence

from rlstable.io.console import setting
from rlstable.report.markup import swatch, table, text
from rlstable.report.run_record import RunRecord

_COLUMNS = ("key", "old", "new", "how")


def changed_settings(records: Sequence[RunRecord]) -> str:
    """Returns the changed settings as an HTML table; empty if there are none."""
    several = len(records) > 1
    rows = [
        [
            *([f"{swatch(index)}{text(record.name)}"] if several else []),
            text(f"{event.get('step', 0):,}"),
            *(f"<code>{text(setting(event.get(column)))}</code>" for column in _COLUMNS),
        ]
        for index, record in enumerate(records)
        for event in record.of_kind("configuration_changed")
    ]
    if not rows:
        return ""
    head = [*(["run"] if several else []), "step", *_COLUMNS]
    return "<h2>Changed settings</h2>" + table(head, rows, [1 if several else 0])
