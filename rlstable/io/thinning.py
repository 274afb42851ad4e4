"""Limits the size of a long run's record: drops old rows of metrics and sums up old guard trips.

Rows and events are thinned when there are more than `MOST`. The newest `NEWEST` entries are never changed.

| older entries | kept |
|---|---|
| rows | the first row, evenly spaced rows, and every row of an evaluation |
| rows with extremes | per section of steps, the rows with the minimum or maximum of a metric, so curves keep spikes |
| guard trips | per section of steps and guard, one event with the sum of the counts |
| other events | all |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Entry = Mapping[str, Any]
Read = Callable[[], Iterator[Entry]]

MOST = 10_000  # rows, and events
NEWEST = 1_000  # entries that are never changed
_SPACED = 2_000  # older rows, evenly spaced over the steps
_STRETCHES = 50  # sections of steps whose extremes are kept
_LANES = 500  # sections of steps in which the trips of a guard become one event; the report shows fewer
_NOT_COUNTS = ("step", "time", "kind", "guard")


def due(count: int, kept: int) -> bool:
    """Whether to thin: at more than `MOST` entries, and at more than twice the entries after the last thinning.

    Args:
        count: Number of entries.
        kept: Number of entries after the last thinning; 0 before the first.
    """
    return count > max(MOST, 2 * kept)


def thinned_rows(read: Read) -> Iterator[Entry]:
    """The rows to keep, in order.

    Args:
        read: Returns all rows, with ascending `step`. Called three times, so that a long file need not be in memory.
    """
    kept, steps = set[int](), list[float]()
    for number, row in enumerate(read()):
        steps.append(row["step"])
        if any(key.startswith("eval/") for key in row):
            kept.add(number)
    old = max(len(steps) - NEWEST, 0)
    last, gap = -math.inf, _span(steps[:old]) / _SPACED
    for number in range(old):
        if steps[number] - last >= gap:
            last = steps[number]
            kept.add(number)
    numbered = enumerate(read())
    for start, end in _stretches(steps[:old], _STRETCHES):
        kept |= _extremes(itertools.islice(numbered, end - start))
    return (row for number, row in enumerate(read()) if number in kept or number >= old)


def thinned_events(read: Read) -> Iterator[Entry]:
    """The events to keep, with old trips summed up. A sum has the step and time of its first trip.

    Args:
        read: Returns all events. Called twice.
    """
    steps = [event["step"] for event in read()]
    events = read()
    for start, end in _stretches(steps[: max(len(steps) - NEWEST, 0)], _LANES):
        kept: list[Entry] = []
        sums: dict[str, dict[str, Any]] = {}
        for event in itertools.islice(events, end - start):
            if event.get("kind") != "guard_tripped":
                kept.append(event)
                continue
            guard = str(event.get("guard"))
            if guard in sums:
                _add(sums[guard], event)
            else:
                sums[guard] = dict(event)
                kept.append(sums[guard])
        yield from kept
    yield from events


class History(list[Any]):
    """Rows in memory, thinned like the rows on disk."""

    def __init__(self) -> None:
        super().__init__()
        self._kept = 0

    def append(self, row: Any) -> None:
        """Adds a row."""
        super().append(row)
        if due(len(self), self._kept):
            self[:] = list(thinned_rows(self.__iter__))
            self._kept = len(self)


def _add(total: dict[str, Any], event: Entry) -> None:
    for cause, count in event.items():
        if cause not in _NOT_COUNTS and isinstance(count, int) and not isinstance(count, bool):
            total[cause] = total.get(cause, 0) + count
    total["added_up"] = True  # a boolean, so that it is not a count


def _span(steps: Sequence[float]) -> float:
    # The steps of a resumed run's events can decrease.
    return float(max(steps) - min(steps)) if steps else 0.0


def _stretches(steps: Sequence[float], count: int) -> Iterator[tuple[int, int]]:
    """Start and end (exclusive) of the entries of every non-empty section of steps."""
    length, start = _span(steps) / count, 0
    for number in range(1, len(steps) + 1):
        if number == len(steps) or steps[number] - steps[start] > length:
            yield start, number
            start = number


def _extremes(rows: Iterator[tuple[int, Entry]]) -> set[int]:
    """Numbers of the rows with the minimum or maximum of a metric."""
    minima: dict[str, tuple[float, int]] = {}
    maxima: dict[str, tuple[float, int]] = {}
    for number, row in rows:
        for key, value in row.items():
            if isinstance(value, int | float) and math.isfinite(value):
                if key not in minima or value < minima[key][0]:
                    minima[key] = value, number
                if key not in maxima or value > maxima[key][0]:
                    maxima[key] = value, number
    return {number for extremes in (minima, maxima) for _, number in extremes.values()}
