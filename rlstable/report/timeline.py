"""Timeline of a run as lanes of marks: guard trips, rollbacks, precision, memory, saves."""

from __future__ import annotations

import html
import math

from rlstable.io.console import describe_event
from rlstable.report.chart import Mark, Scale, step_labels
from rlstable.report.run_record import RunRecord

_WIDTH, _LEFT, _RIGHT, _LANE, _FOOT = 1000.0, 150.0, 14.0, 24.0, 24.0
_BINS = 200  # positions in a lane; marks at one position are merged
_MOST_LINES = 12  # of the tooltip of merged marks

# Lanes of events in order: name, kinds, style.
_LANES = (
    ("rollbacks", ("rolled_back", "remedy_applied", "remedy_taken_back", "last_good_handed_over"), "bad"),
    ("precision", ("precision_changed",), "warn"),
    ("memory", ("memory_planned", "memory_tight", "evaluation_divided"), "warn"),
    ("evaluations", ("evaluation_void",), "bad"),
    ("incidents", ("incident", "incident_failed"), "bad"),
    ("checkpoints", ("checkpoint_failed", "checkpoint_damaged", "checkpoint_saved_again"), "warn"),
    ("signs", ("sign", "sign_recovered"), "warn"),
    ("growth", ("environments_redrawn",), "good"),
    ("settings", ("configuration_changed",), "warn"),
    ("starts and ends", ("resumed", "started_again", "stopped", "error"), "plain"),
)


def lanes(record: RunRecord) -> dict[str, list[Mark]]:
    """The marks by lane, without empty lanes; the value of a mark is its number of trips."""
    found: dict[str, list[Mark]] = {}
    for guard, trips in record.trips().items():
        found[f"trips of {guard}"] = [
            Mark(f"{guard}: {count:,.0f} trip{'s' * (count != 1)}", step, count, "bad") for step, count in trips
        ]
    for name, kinds, style in _LANES:
        events = record.of_kind(*kinds)
        if events:
            found[name] = [Mark(event_text(event), float(event.get("step", 0)), 1.0, style) for event in events]
    return found


def event_text(event: dict[str, object]) -> str:
    """An event in one line, as on the console."""
    fields = {key: value for key, value in event.items() if key not in ("step", "time", "kind")}
    return describe_event(str(event.get("kind")), fields)


def timeline(record: RunRecord, end: float) -> str:
    """The lanes as SVG; empty if nothing but starts and ends happened."""
    found = lanes(record)
    if found.keys() <= {"starts and ends"}:
        return ""
    x = Scale(0.0, max(end, 1.0), _LEFT, _WIDTH - _RIGHT)
    height = _LANE * len(found) + _FOOT
    parts = []
    for number, (name, marks) in enumerate(found.items()):
        middle = _LANE * (number + 0.5)
        parts.append(
            f'<line class="grid" x1="{x.start:g}" x2="{x.end:g}" y1="{middle:g}" y2="{middle:g}"/><text class="lane" '
            f'x="{x.start - 10:g}" y="{middle + 4:g}" text-anchor="end">{html.escape(name)}</text>'
        )
        together: dict[int, list[Mark]] = {}  # by position
        for mark in marks:
            together.setdefault(int((mark.step or 0.0) / x.high * _BINS), []).append(mark)
        parts += [_drawn(group, x, middle) for group in together.values()]
    parts.append(step_labels(x, 8, height - 7))
    label = html.escape(f"events over the steps of {record.name}")
    size = f"0 0 {_WIDTH:g} {height:g}"
    return f'<svg class="timeline" viewBox="{size}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _drawn(group: list[Mark], x: Scale, middle: float) -> str:
    lines = [f"step {mark.step:,.0f}  {mark.text}" for mark in group[:_MOST_LINES]]
    lines += [f"and {len(group) - _MOST_LINES:,} more"] if len(group) > _MOST_LINES else []
    count = sum(mark.value or 0.0 for mark in group)
    tall = min(_LANE - 6, 9 + 3 * math.log10(max(count, 1.0)))
    left, top, title = float(x(group[0].step or 0.0)) - 2, middle - tall / 2, html.escape("\n".join(lines))
    return (
        f'<rect class="mark {group[0].style}" x="{left:.1f}" y="{top:.1f}" width="4" height="{tall:.1f}" rx="1.5">'
        f"<title>{title}</title></rect>"
    )
