"""Timeline of a run as lanes of marks: guard trips, rollbacks, precision, memory, saves."""

from __future__ import annotations

import html
from typing import NamedTuple

import numpy as np

from rlstable.io.console import describe_event
from rlstable.report.chart import Scale, step_labels
from rlstable.report.run_record import RunRecord

_WIDTH, _LEFT, _RIGHT, _LANE, _FOOT = 1000.0, 150.0, 14.0, 24.0, 24.0
_BINS = 200  # positions in a lane; marks at one position are merged
_MOST_LINES = 12  # of the tooltip of merged marks

# Lanes of events in order: name, kinds, style.
_LANES = (
    ("rollbacks", ("rolled_back", "remedy_taken_back"), "bad"),
    ("precision", ("precision_changed", "precision_not_delivered"), "warn"),
    ("memory", ("memory_planned", "memory_tight", "evaluation_divided"), "warn"),
    ("evaluations", ("evaluation_void", "evaluation_slow"), "bad"),
    ("incidents", ("incident", "incident_failed"), "bad"),
    ("checkpoints", ("checkpoint_failed", "checkpoint_damaged", "checkpoint_saved_again"), "warn"),
    ("signs", ("sign", "sign_recovered"), "warn"),
    ("growth", ("environments_redrawn",), "good"),
    ("settings", ("configuration_changed",), "warn"),
    ("starts and ends", ("resumed", "stopped", "error"), "plain"),
)


class Mark(NamedTuple):
    """A mark at an environment step, for `weight` occurrences, with the text of its tooltip."""

    step: float
    text: str
    weight: float = 1.0


def lanes(record: RunRecord) -> dict[str, tuple[str, list[Mark]]]:
    """Returns style and marks by lane, without empty lanes."""
    found: dict[str, tuple[str, list[Mark]]] = {}
    for guard, trips in record.trips().items():
        marks = [
            Mark(step, f"{guard}: {count:,.0f} {'trip' if count == 1 else 'trips'}", count) for step, count in trips
        ]
        found[f"trips of {guard}"] = ("bad", marks)
    for name, kinds, style in _LANES:
        marks = [Mark(float(event.get("step", 0)), event_text(event)) for event in record.of_kind(*kinds)]
        if marks:
            found[name] = (style, marks)
    return found


def event_text(event: dict[str, object]) -> str:
    """Returns an event in one line, as on the console."""
    fields = {key: value for key, value in event.items() if key not in ("step", "time", "kind")}
    return describe_event(str(event.get("kind")), fields)


def timeline(record: RunRecord, end: float) -> str:
    """Returns the lanes as SVG; empty if nothing but starts and ends happened."""
    found = lanes(record)
    if found.keys() <= {"starts and ends"}:
        return ""
    x = Scale(0.0, max(end, 1.0), _LEFT, _WIDTH - _RIGHT)
    height = _LANE * len(found) + _FOOT
    parts = []
    for number, (name, (style, marks)) in enumerate(found.items()):
        middle = _LANE * (number + 0.5)
        parts.append(
            f'<line class="grid" x1="{x.start:g}" x2="{x.end:g}" y1="{middle:g}" y2="{middle:g}"/><text class="lane" '
            f'x="{x.start - 10:g}" y="{middle + 4:g}" text-anchor="end">{html.escape(name)}</text>'
        )
        parts += [_drawn(mark, float(x(mark.step)), middle, style) for mark in _merged(marks, end)]
    parts.append(step_labels(x, 8, height - 7))
    label = html.escape(f"events over the steps of {record.name}")
    size = f"0 0 {_WIDTH:g} {height:g}"
    return f'<svg class="timeline" viewBox="{size}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _merged(marks: list[Mark], end: float) -> list[Mark]:
    """Merges marks at the same position."""
    groups: dict[int, list[Mark]] = {}
    for mark in marks:
        groups.setdefault(int(mark.step / max(end, 1.0) * _BINS), []).append(mark)
    joined = []
    for group in groups.values():
        lines = [f"step {mark.step:,.0f}  {mark.text}" for mark in group[:_MOST_LINES]]
        lines += [f"and {len(group) - _MOST_LINES:,} more"] if len(group) > _MOST_LINES else []
        step = float(np.mean([mark.step for mark in group]))
        joined.append(Mark(step, "\n".join(lines), sum(mark.weight for mark in group)))
    return joined


def _drawn(mark: Mark, across: float, middle: float, style: str) -> str:
    tall = min(_LANE - 6, 9 + 3 * float(np.log10(max(mark.weight, 1.0))))
    return (
        f'<rect class="mark {style}" x="{across - 2:.1f}" y="{middle - tall / 2:.1f}" width="4" height="{tall:.1f}" '
        f'rx="1.5"><title>{html.escape(mark.text)}</title></rect>'
    )
