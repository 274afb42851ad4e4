"""Timeline of a run as lanes of marks: guard trips, rollbacks, precision, memory, saves."""

from __future__ import annotations

import html
from typing import NamedTuple

import numpy as np

from rlstable.io.console import describe_event
from rlstable.report.chart import Scale, readable, ticks
from rlstable.report.run_record import RunRecord

_WIDTH, _LEFT, _RIGHT, _LANE, _FOOT = 1000.0, 150.0, 14.0, 24.0, 24.0
_BINS = 200  # positions in a lane; marks at one position are merged

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
    """A mark for one or more events.

    Attributes:
        step: Environment step.
        text: Text of the tooltip.
        weight: Number of occurrences, at least 1.
    """

    step: float
    text: str
    weight: float = 1.0


def lanes(record: RunRecord) -> dict[str, tuple[str, list[Mark]]]:
    """Returns style and marks by lane, without empty lanes."""
    found: dict[str, tuple[str, list[Mark]]] = {}
    for guard in record.guards:
        steps, counts = record.trips(guard)
        marks = [
            Mark(float(step), f"{guard}: {count:,.0f} {'trip' if count == 1 else 'trips'}", float(count))
            for step, count in zip(steps, counts, strict=True)
        ]
        if marks:
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
    """Returns the lanes as SVG; empty without events."""
    found = lanes(record)
    if not found:
        return ""
    x = Scale(0.0, max(end, 1.0), _LEFT, _WIDTH - _RIGHT)
    height = _LANE * len(found) + _FOOT
    parts = []
    for number, (name, (style, marks)) in enumerate(found.items()):
        middle = _LANE * (number + 0.5)
        parts.append(f'<line class="grid" x1="{_LEFT:g}" x2="{_WIDTH - _RIGHT:g}" y1="{middle:g}" y2="{middle:g}"/>')
        parts.append(
            f'<text class="lane" x="{_LEFT - 10:g}" y="{middle + 4:g}" text-anchor="end">{html.escape(name)}</text>'
        )
        parts += [_mark(mark, x, middle, style) for mark in _merged(marks, x)]
    for value in ticks(x.low, x.high, 8):
        at = float(x(value))
        anchor = "end" if at > _WIDTH - _RIGHT - 12 else "middle"
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - 7:g}" text-anchor="{anchor}">{readable(value)}</text>'
        )
    label = f"events over the steps of {record.name}"
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH:g} {height:g}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _merged(marks: list[Mark], x: Scale) -> list[Mark]:
    """Merges marks at the same position."""
    groups: dict[int, list[Mark]] = {}
    for mark in marks:
        share = (float(x(mark.step)) - x.start) / (x.end - x.start)
        groups.setdefault(int(share * _BINS), []).append(mark)
    joined = []
    for group in groups.values():
        lines = [f"step {mark.step:,.0f}  {mark.text}" for mark in group[:12]]
        lines += [f"and {len(group) - 12:,} more"] if len(group) > 12 else []
        step = float(np.mean([mark.step for mark in group]))
        joined.append(Mark(step, "\n".join(lines), sum(mark.weight for mark in group)))
    return joined


def _mark(mark: Mark, x: Scale, middle: float, style: str) -> str:
    tall = min(_LANE - 6, 9 + 3 * float(np.log10(max(mark.weight, 1.0))))
    left, top = float(x(mark.step)) - 2, middle - tall / 2
    return (
        f'<rect class="mark {style}" x="{left:.1f}" y="{top:.1f}" width="4" height="{tall:.1f}" rx="1.5">'
        f"<title>{html.escape(mark.text)}</title></rect>"
    )
